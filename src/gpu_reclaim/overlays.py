r"""A copy of SGLang's MoE kernel configs with one file of ours: the scripts, as shell text.

SGLANG_MOE_CONFIG_DIR replaces the built-in folder, so a folder with our file alone would take all
other shapes' configs away; and SGLang 0.5.13 and newer read every `triton_*` name in it as numbers.
So an overlay has all that the server finds now and our file, and nothing else; of the same shape's
configs for the second product none. The installed package and the checkout stay as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from gpu_reclaim.lease import HOST, TRIAL_FILE, Places
from gpu_reclaim.moeconfigs import ConfigName

VARIABLE = "SGLANG_MOE_CONFIG_DIR"
"""Names the folder whose `configs/` the server looks in (`fused_moe_triton_config.py`)."""

FOLDER = "gpu-reclaim-moe"
"""Below /var/lib: where overlays are, readable for the server's user."""

_BUILD = r"""
umask 022
[ ! -e "$TARGET" ] || { echo 'built yes'; exit 0; }
# Without all that the server finds now it would be no copy.
[ -d "$BASE/configs" ] || exit 1
new="$TARGET.new"
rm -rf "$new" && mkdir -p "$new/configs" || exit 1
for folder in "$BASE"/configs/triton_*; do
  version=${folder##*/triton_}
  # A backup beside the others ends newer servers, and is none of the configs.
  case "$version" in *[!0-9_]* | '' | _* | *_) continue;; esac
  [ -d "$folder" ] || continue
  mkdir "$new/configs/triton_$version" &&
    find -L "$folder" -maxdepth 1 -type f -name 'E=*.json' \
      -exec cp -- {} "$new/configs/triton_$version/" ';' || exit 1
done
# What was tuned serves both products. Another file for the second one may have other blocks of M,
# and SGLang 0.5.9 ends at start where the two differ.
rm -f "$new"/configs/triton_*/"$DOWN"
mkdir -p "$new/configs/triton_$TRITON" &&
  printf '%s' "$TEXT" >"$new/configs/triton_$TRITON/$NAME" &&
  chmod -R u=rwX,go=rX "$new" && mv "$new" "$TARGET" && echo 'built yes'
"""

_TIDY = r"""
named() {
  for file in "$ETC/$UNIT.d"/* "$UNITS/$UNIT.d"/*; do
    [ -f "$file" ] && [ "${file##*/}" != "$TRIAL" ] || continue
    ! grep -qF -- "$1" "$file" || return 0
  done
  return 1
}
[ -d "$ROOT" ] || exit 0
for entry in "$ROOT"/*; do
  [ -e "$entry" ] || continue
  case "$KEPT" in *" ${entry##*/} "*) continue;; esac
  # A drop-in that is hidden now, by one of the same name, may count again; a trial's will not.
  ! named "$entry" || continue
  rm -rf -- "$entry"
done
for folder in "$ROOT" "${ROOT%/*}"; do
  [ -n "$(ls -A "$folder")" ] || rmdir -- "$folder" || exit 1
done
"""


def root(unit: str, places: Places = HOST) -> str:
    """Folder of a unit's overlays."""
    return f"{places.lib}/{FOLDER}/{unit}"


def build(target: str, base: str, triton: str, name: ConfigName, text: str) -> str:
    """Shell text that makes an overlay; one that is there is whole, and stays.

    Args:
        target: Its folder; the name goes by its content.
        base: Folder whose `configs/` the server looks in now.
        triton: Version of the server's Triton, for example `3.6.0`.
        name: Of our file.
        text: Its content.
    """
    values = {
        "TARGET": target,
        "BASE": base,
        "TRITON": triton.replace(".", "_"),
        "NAME": str(name),
        "DOWN": str(replace(name, down=True)),
        "TEXT": text,
    }
    return f"{_set(values)}\n{_BUILD}"


def tidy(unit: str, kept: list[str], places: Places = HOST) -> str:
    """Shell text that removes a unit's overlays but for some.

    Args:
        unit: The unit.
        kept: Folders that stay, by path.
        places: Where things are.
    """
    names = "".join(f"{path.rpartition('/')[2]} " for path in kept)
    values = {
        "ROOT": root(unit, places),
        "KEPT": f" {names}",
        "UNIT": unit,
        "ETC": f"{places.etc}/systemd/system",
        "UNITS": f"{places.run}/systemd/system",
        "TRIAL": TRIAL_FILE,
    }
    return f"{_set(values)}\n{_TIDY}"


def _set(values: Mapping[str, str]) -> str:
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in values.items())


def drop_in(unit: str, overlay: str) -> str:
    """Text of the drop-in that gives a unit an overlay."""
    return f"""# Written by gpu-reclaim: {unit} with other MoE kernel configs.
# To undo: remove this file and {overlay},
# then `systemctl daemon-reload` and restart the unit.
[Service]
Environment="{VARIABLE}={overlay}"
"""
