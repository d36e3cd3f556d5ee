"""The pretend monitoring agent: a Python program that holds no GPU. It must be left alone."""

import os

if __name__ == "__main__":
    print("ready", flush=True)
    os.read(0, 1)
