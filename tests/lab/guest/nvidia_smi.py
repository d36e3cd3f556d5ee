#!/usr/bin/python3 -IS
"""A stand-in for nvidia-smi: the options and the output of driver 590, nothing else.

What it reports and which files change it is described in gpu_charges.py, which lies beside it.
The output's form follows captures of the real tool.
"""

# pathlib alone takes longer to import than this whole program to run.
# ruff: noqa: PTH120

import os
import sys
import time

# An isolated interpreter does not look into the script's own folder.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest import gpu_charges as gpus
else:
    import gpu_charges as gpus

DRIVER, CUDA = "590.48.01", "13.1"
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
UUIDS = (
    "GPU-5d0c1b7e-3f52-4c1a-9a60-0b8e3c6f1a01",
    "GPU-8a4e9d20-71bb-4d0e-8f3c-2c97d5e4b702",
    "GPU-c3f6a815-0e9d-4b27-b1d4-6a50f8c2e903",
    "GPU-e17b2c94-a6d8-4f35-8c0e-9d43b7a6f504",
)
ALIASES = {
    "gpu_uuid": "uuid",
    "gpu_name": "name",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "used_memory": "used_gpu_memory",
}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
Row = dict[str, str]


class AnswerError(Exception):
    """Ends the call with a message and an exit code."""

    def __init__(self, code: int, text: str) -> None:
        """Keeps the exit code and the text to print."""
        super().__init__(text)
        self.code = code
        self.text = text


def timestamp() -> str:
    """Returns the time as nvidia-smi prints it, to the millisecond."""
    now = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03}"


def gpu_row(index: int, mib: int) -> Row:
    """Returns one GPU's values, with units."""
    return {
        "timestamp": timestamp(),
        "index": str(index),
        "count": str(len(gpus.node_ids())),
        "name": NAME,
        "uuid": UUIDS[index],
        "serial": f"17930240000{index:02}",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "driver_version": DRIVER,
        "memory.total": f"{gpus.TOTAL} MiB",
        "memory.reserved": f"{gpus.RESERVED} MiB",
        "memory.used": f"{mib} MiB",
        "memory.free": f"{gpus.TOTAL - gpus.RESERVED - mib} MiB",
        "utilization.gpu": "0 %",
        "mig.mode.current": "Disabled",
        "mig.mode.pending": "Disabled",
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "compute_cap": "12.0",
        "pstate": "P8" if mib == 0 else "P0",
        "gpu_recovery_action": "None",
    }


def gpu_rows(sums: dict[int, int]) -> list[Row]:
    """Returns the rows of all GPUs that are to be seen, with what a test overrides."""
    missing = gpus.state("missing").replace(",", " ").split()
    rows = {str(gpu): gpu_row(gpu, mib) for gpu, mib in sums.items() if str(gpu) not in missing}
    for line in gpus.state("override").splitlines():
        index, field, value = line.split(None, 2)
        if index in rows:
            rows[index][ALIASES.get(field, field)] = value
    return list(rows.values())


def app_rows(found: gpus.Holders, rows: list[Row]) -> list[Row]:
    """Returns the rows of the processes that compute on the given GPUs."""
    listed = []
    kind = gpus.state("apps") or "real"
    for (pid, _), charged in sorted(found.items(), key=lambda item: int(item[0][0])):
        shown = pid if kind == "hostpids" else gpus.own_pid(pid)
        if kind == "none" or shown is None:
            continue
        extra = {"pid": shown, "process_name": gpus.title(pid) or "[Not Found]"}
        for row in rows:
            mib = charged.get(int(row["index"]), 0)
            if mib:
                listed.append({**row, **extra, "used_gpu_memory": f"{mib} MiB"})
    return listed


def table(rows: list[Row], fields: str, layout: str, known: set[str]) -> str:
    """Returns a CSV table as --query-gpu and --query-compute-apps print it."""
    options = layout.split(",")
    if "csv" not in options:
        raise AnswerError(2, '"--format=" switch is missing its value. It must contain "csv".\n')
    names = [name.strip() for name in fields.split(",")]
    for name in names:
        if ALIASES.get(name, name) not in known:
            raise AnswerError(2, f'Field "{name}" is not a valid field to query.\n\n')
    lines = [[row[ALIASES.get(name, name)] for name in names] for row in rows]
    if "nounits" in options:
        lines = [[bare(value) for value in line] for line in lines]
    if "noheader" not in options:
        lines.insert(0, [headed(name, "nounits" not in options) for name in names])
    return "".join(", ".join(line) + "\n" for line in lines)


def bare(value: str) -> str:
    """Returns a value without its unit."""
    return value.removesuffix(" MiB").removesuffix(" %")


def headed(name: str, units: bool) -> str:
    """Returns a column's header: used_memory goes by its main name, as for real."""
    name = "used_gpu_memory" if name == "used_memory" else name
    memory = name.startswith("memory.") or name == "used_gpu_memory"
    unit = " [MiB]" if memory else " [%]" if name.startswith("utilization.") else ""
    return name + (unit if units else "")


def selected(rows: list[Row], wanted: str) -> list[Row]:
    """Returns the rows named by -i: indexes, UUIDs or bus addresses."""
    found = []
    for word in wanted.split(","):
        match = [row for row in rows if word in (row["index"], row["uuid"], row["pci.bus_id"])]
        if not match:
            raise AnswerError(6, "No devices were found\n")
        found += match
    return found


def overview(rows: list[Row], apps: list[Row]) -> str:
    """Returns what nvidia-smi prints without arguments."""
    rule = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+\n"
    wide = "+" + "-" * 89 + "+\n"
    versions = f"NVIDIA-SMI {DRIVER:<22} Driver Version: {DRIVER:<14} CUDA Version: {CUDA:<8}"
    text = time.strftime("%a %b %e %H:%M:%S %Y       \n") + wide + f"| {versions} |\n" + rule
    text += f"| GPU  Name{'Persistence-M ':>31}| {'Bus-Id          Disp.A ':<23}"
    text += f"| Volatile Uncorr. ECC |\n| {'Fan  Temp   Perf          Pwr:Usage/Cap ':<40}"
    text += f"|{'Memory-Usage ':>24}| GPU-Util  Compute M. |\n"
    text += f"|{'':41}|{'':24}|{'MIG M. ':>22}|\n"
    text += "|" + rule.replace("-", "=")[1:-2] + "|\n"
    text += "".join(board(row) + rule for row in rows) + "\n" + wide + f"| {'Processes:':<88}|\n"
    text += f"|  {'GPU   GI   CI              PID   Type   Process name':<76}GPU Memory |\n"
    text += f"|  {'      ID   ID':<76}Usage      |\n|" + "=" * 89 + "|\n"
    for app in apps:
        mib = app["used_gpu_memory"].replace(" ", "")
        text += f"|{app['index']:>5}   N/A  N/A {app['pid']:>15}      C   "
        text += f"{app['process_name'][:36]:<36}{mib:>10} |\n"
    return text + ("" if apps else f"|  {'No running processes found':<87}|\n") + wide


def board(row: Row) -> str:
    """Returns a GPU's three lines in the overview."""
    name = row["name"] if len(row["name"]) <= 27 else row["name"][:24] + "..."
    memory = f"{row['memory.used'].replace(' ', '')} / {row['memory.total'].replace(' ', ''):>9}"
    first = f"|{row['index']:>4}  {name:<27}{'On':>7} |   {row['pci.bus_id']} Off |{'0 ':>22}|\n"
    load = f"{row['utilization.gpu'].replace(' ', ''):>8}      {row['compute_mode']:>7} "
    second = f"| N/A   30C    {row['pstate']}             32W /  600W | {memory:>22} |{load:>22}|\n"
    return first + second + f"|{'':41}|{'':24}|{row['mig.mode.current'] + ' ':>22}|\n"


def listing(rows: list[Row]) -> str:
    """Returns what -L prints."""
    return "".join(f"GPU {row['index']}: {row['name']} (UUID: {row['uuid']})\n" for row in rows)


def parse(argv: list[str]) -> dict[str, str]:
    """Returns the options, each with its value, which may be the next word."""
    options: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--query-gpu", "--query-compute-apps", "--format", "-i", "--id"):
            options["-i" if name == "--id" else name] = value if equals else next(words, "")
        elif name in ("-L", "--list-gpus", "--version"):
            options["-L" if name == "--list-gpus" else name] = ""
        else:
            raise AnswerError(2, f"Invalid combination of input arguments: {word}\n")
    return options


def answer(options: dict[str, str], found: gpus.Holders, sums: dict[int, int]) -> str:
    """Returns what the call prints."""
    failure = gpus.state("fail")
    if failure:
        code, _, text = failure.partition(" ")
        raise AnswerError(int(code), text + "\n")
    if not sums:
        raise AnswerError(9, NO_DRIVER)
    if "--version" in options:
        short = DRIVER.rpartition(".")[0]
        versions = [("NVIDIA-SMI", DRIVER), ("NVML", short), ("DRIVER", DRIVER)]
        lines = [f"{name + ' version':<20}: {value}\n" for name, value in versions]
        return "".join([*lines, f"CUDA Version        : {CUDA}\n"])
    rows = gpu_rows(sums)
    rows = selected(rows, options["-i"]) if "-i" in options else rows
    if "-L" in options:
        return listing(rows)
    known = set(gpu_row(0, 0))
    if "--query-gpu" in options:
        return table(rows, options["--query-gpu"], options.get("--format", ""), known)
    apps = app_rows(found, rows)
    if "--query-compute-apps" in options:
        known |= {"pid", "process_name", "used_gpu_memory"}
        return table(apps, options["--query-compute-apps"], options.get("--format", ""), known)
    return overview(rows, apps)


def main(argv: list[str]) -> int:
    """Answers one call and writes it down; the exit code is the real tool's."""
    time.sleep(float(gpus.state("delay") or 0))
    nodes = gpus.node_ids()
    found = gpus.holders(nodes)
    sums = gpus.used(found, nodes)
    gpus.record(argv, sums)
    try:
        print(answer(parse(argv), found, sums), end="")
    except AnswerError as stop:
        print(stop.text, end="")
        return stop.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
