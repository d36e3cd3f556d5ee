"""A monitoring agent written in Python: an innocent, which nobody may end."""

import time

while True:
    time.sleep(3600)
