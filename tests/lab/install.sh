#!/bin/sh
# Installs what the lab needs on Debian or Ubuntu. Safe to run again; says nothing when all is there.
set -eu

packages="lxc debootstrap openssh-server openssh-client iproute2 psmisc procps busybox gcc libc6-dev
fish tcsh sudo nftables util-linux"
policy=/usr/sbin/policy-rc.d

fail() {
    echo "lab: $*" >&2
    exit 1
}

missing() {
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' ||
            printf '%s ' "$package"
    done
}

restore_policy() {
    rm -f "$policy"
    [ ! -e "$policy.before-lab" ] || mv "$policy.before-lab" "$policy"
}

[ "$(id -u)" = 0 ] || fail "root is missing: it boots a container"
command -v apt-get >/dev/null || fail "apt-get is missing: install $packages yourself"
wanted=$(missing)
[ -n "$wanted" ] || exit 0

# No service may start because of us: the node's SSH server is started by the lab itself.
[ ! -e "$policy" ] || mv "$policy" "$policy.before-lab"
trap restore_policy EXIT
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
{
    apt-get update -q &&
        # shellcheck disable=SC2086  # a list of words
        apt-get install -y -q --no-install-recommends $wanted
} >"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    fail "could not install: $wanted"
}
rm -f "$log"

# Nor at the next boot, where it was not there before.
case " $wanted" in
*" openssh-server "*) [ ! -d /run/systemd/system ] || systemctl disable --quiet ssh.service ;;
esac
wanted=$(missing)
[ -z "$wanted" ] || fail "still missing: $wanted"
