"""A folder that plays a host's /run and /var/lib, and a systemctl that knows what is held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpu_reclaim import holding, trying
from gpu_reclaim.commands import Section
from gpu_reclaim.holding import Answer, Claim
from gpu_reclaim.lease import TUNED_FILE, Places
from gpu_reclaim.models import Lease
from gpu_reclaim.restoring import parse_units
from unit.shells import here, stub

SYSTEMCTL = r"""
printf '%s\n' "$*" >>@HOME@/calls
for name in "$@"; do :; done
set_state() { printf 'ActiveState=%s\nSubState=%s\n' "$2" "$3" >@HOME@/"$1".state; }
case " $* " in
  *" show "*)
    [ "$2" = --no-pager ] || exit 1
    file=@HOME@/"$name".state
    if [ -e "$file" ]; then
      cat "$file"
      [ ! -e @HOME@/"$name".triggers ] || cat @HOME@/"$name".triggers
      [ ! -e @HOME@/stale ] || echo NeedDaemonReload=yes
      if [ -e @HOME@/"$name".file ]; then echo LoadState=loaded; else echo LoadState=not-found; fi
    else printf 'LoadState=not-found\nActiveState=inactive\nSubState=dead\n'; fi;;
  *" cat "*)
    cat @HOME@/"$name".file
    for one in @ETC@/systemd/system/"$name".d/*.conf @RUN@/systemd/system/"$name".d/*.conf; do
      [ ! -e "$one" ] || { echo; echo "# $one"; cat "$one"; }
    done;;
  *" daemon-reload "*) [ ! -e @HOME@/stale ] || exit 1;;
  *" is-enabled "*) echo enabled;;
  *" start "*)
    held=@RUN@/systemd/system/"$name".d/50-gpu-reclaim-hold.conf
    if [ -e @RUN@/gpu-reclaim/hold ] && [ -e "$held" ]; then
      echo "Assertion failed on job for $name." >&2; exit 1
    fi
    if [ -e @HOME@/"$name".broken ]; then set_state "$name" failed failed; exit 1; fi
    sleep @SLOW@
    set_state "$name" active running;;
  *" kill "*) rm -f @HOME@/"$name".deaf;;
  *" stop "*)
    [ ! -e @HOME@/"$name".deaf ] || exit 1
    set_state "$name" inactive dead;;
esac
"""


class HeldHost:
    """A host with units; `calls` has each call of systemctl, a line each."""

    def __init__(self, folder: Path, *, slow: str = "0") -> None:
        self.home = folder / "home"
        self.places = Places(str(folder / "run"), str(folder / "lib"), str(folder / "etc"))
        self.tools = folder / "tools"
        for each in (self.home, self.tools, Path(self.places.run), Path(self.places.lib)):
            each.mkdir()
        (Path(self.places.run) / "systemd/system").mkdir(parents=True)
        text = SYSTEMCTL.replace("@HOME@", str(self.home)).replace("@RUN@", self.places.run)
        text = text.replace("@ETC@", self.places.etc)
        stub(self.tools, "systemctl", text.replace("@SLOW@", slow))
        timer = f"printf 'ActiveState=active\\n' >{self.home}/gpu-reclaim-deadman.timer.state"
        stub(self.tools, "systemd-run", timer)

    def unit(self, name: str, state: str = "active", triggers: str = "") -> None:
        (self.home / f"{name}.state").write_text(f"ActiveState={state}\nSubState=running\n")
        (self.home / f"{name}.file").write_text(f"# {name}\n[Service]\n")
        if triggers:
            (self.home / f"{name}.triggers").write_text(f"TriggeredBy={triggers}\n")

    def state(self, name: str) -> str:
        return (self.home / f"{name}.state").read_text().split("\n")[0].partition("=")[2]

    def stop(self, *names: str) -> None:
        for name in names:
            (self.home / f"{name}.state").write_text("ActiveState=inactive\nSubState=dead\n")

    def begin(self, name: str, text: str, token: str = "t1") -> Answer:
        body = trying.begin(Claim(token, ttl_s=60), name, text, places=self.places)
        return holding.parse(self._run(body))

    def close(self, token: str = "t1") -> Answer:
        return holding.parse(self._run(trying.close(Claim(token), places=self.places)))

    def keep(self, name: str, text: str, *, lasting: bool, token: str = "t1") -> Answer:
        claim = Claim(token, ttl_s=60)
        body = trying.keep(claim, name, text, file=TUNED_FILE, lasting=lasting, places=self.places)
        return holding.parse(self._run(body))

    def kept(self, name: str, text: str, *, lasting: bool) -> bool:
        body = trying.kept(name, text, file=TUNED_FILE, lasting=lasting, places=self.places)
        return self._run(body).value("kept") == "yes"

    def drop_ins(self, name: str) -> list[str]:
        """Names of the drop-ins of a unit, in /etc and /run."""
        places = (Path(self.places.etc), Path(self.places.run))
        found = [path for each in places for path in each.glob(f"systemd/system/{name}.d/*")]
        return sorted(path.name for path in found)

    def start(self, name: str) -> bool:
        """Somebody starts it by hand."""
        return here({"x": f"systemctl start -- {name}"}).section("x").code == 0

    def take(
        self,
        *names: str,
        token: str = "t1",
        owner: str = "me",
        ttl_s: int = 60,
        rest: Sequence[tuple[str, int, int]] = (),
        runs: Sequence[str] = (),
    ) -> Answer:
        claim = Claim(token, owner, "http://run", ttl_s, runs)
        body = holding.take(claim, names, names, rest, places=self.places)
        return holding.parse(self._run(body))

    def prove(self, token: str = "t1") -> Answer:
        return holding.parse(self._run(holding.prove(Claim(token, ttl_s=60), places=self.places)))

    def renew(self, token: str = "t1") -> Answer:
        return holding.parse(self._run(holding.renew(Claim(token, ttl_s=60), places=self.places)))

    def release(self, token: str = "t1") -> Answer:
        return holding.parse(self._run(holding.release(Claim(token), places=self.places)))

    def who(self) -> Lease | None:
        return holding.parse_lease(self._run(holding.who(places=self.places)))

    def restore(self, token: str = "any") -> tuple[str, dict[str, str]]:
        section = self._run(holding.restore(token, places=self.places))
        return section.value("status"), {x.unit: x.outcome for x in parse_units(section)}

    def dead_man(self) -> str:
        """What the timer runs; what it says in the journal."""
        file = self.places_of("gpu-reclaim/restore")
        return here({"x": f"sh {file} expired"}).section("x").text

    def read(self) -> Answer:
        return holding.parse(self._run(holding.read(places=self.places)))

    def _run(self, body: str) -> Section:
        return here({"hold": body}).section("hold")

    def places_of(self, name: str) -> Path:
        return Path(self.places.run) / name

    @property
    def record(self) -> Path:
        return Path(self.places.lib) / "gpu-reclaim/record"

    @property
    def lease(self) -> Path:
        return self.places_of("gpu-reclaim/lease")

    def expire(self) -> None:
        lines = self.lease.read_text().split("\n")
        kept = [line for line in lines if not line.startswith("expires_uptime")]
        self.lease.write_text("\n".join(["expires_uptime 1", *kept]))

    @property
    def traces(self) -> list[str]:
        """Everything below /run and /var/lib that is not there on an idle host."""
        usual = {"systemd", "systemd/system"}
        found = [
            str(path.relative_to(root))
            for root in (Path(self.places.run), Path(self.places.lib))
            for path in root.rglob("*")
        ]
        return sorted(set(found) - usual)

    @property
    def calls(self) -> list[str]:
        return (self.home / "calls").read_text().splitlines()

    @property
    def started(self) -> list[str]:
        return [x.rpartition(" ")[2] for x in self.calls if x.startswith("--no-ask-password start")]
