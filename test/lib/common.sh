# shellcheck shell=bash
# common.sh - what every script of the tests needs: words, packages, the choice
# of a server, a private copy of the tree.  To be sourced; it does nothing.
#
# Sets on request: PG_CONFIG (choose_server).

note() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { note "$*"; exit 1; }

is_root() { [ "$(id -u)" -eq 0 ]; }

# clean_environment: no setting of the caller may lead to another server, and
# what is only on root's path is of no use to the user who runs the tests.
clean_environment() {
    local name
    for name in $(compgen -e | grep -E '^PG' | grep -vE '^PG_(CONFIG$|TEST_)'); do unset "$name"; done
    export LC_ALL=C.UTF-8
    if is_root; then PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; fi
}

# private_folder: make one and print it.  There will be sockets in it, and the
# path of a socket has to be shorter than 108 bytes.
private_folder() {
    local parent=${TMPDIR:-/tmp}
    if [ "${#parent}" -gt 60 ]; then parent=/tmp; fi
    mktemp -d "$parent/idempotency.XXXXXX"
}

# newest_server FILE: the newest major of Debian's layout that has FILE.
newest_server() {
    local bin
    for bin in /usr/lib/postgresql/*/bin; do
        if [ -e "${bin%/bin}/$1" ]; then basename "${bin%/bin}"; fi
    done | sort -n | tail -n 1
}

# choose_server: set PG_CONFIG to the caller's choice, else the newest server
# that extensions can be built for, else the one that could be installed.
choose_server() {
    local major path
    if [ -z "${PG_CONFIG:-}" ]; then
        major=$(newest_server lib/pgxs/src/makefiles/pgxs.mk)
        if [ -z "$major" ] && path=$(command -v pg_config) && [ -e "$("$path" --pgxs)" ]; then
            PG_CONFIG=$path
        else
            [ -n "$major" ] || major=$(newest_server bin/postgres)
            [ -n "$major" ] || major=$(packaged_server)
            PG_CONFIG=/usr/lib/postgresql/$major/bin/pg_config
        fi
    fi
    [ -x "$PG_CONFIG" ] || is_packaged || die "PG_CONFIG=$PG_CONFIG is no program"
    export PG_CONFIG
}

# is_packaged: is PG_CONFIG that of a Debian package, installed or to be installed?
is_packaged() { [[ $PG_CONFIG =~ ^/usr/lib/postgresql/[0-9]+/bin/pg_config$ ]]; }

# packaged_server: the major that Debian installs as its default.
packaged_server() {
    if is_root; then apt_update; fi
    apt-cache show postgresql 2>/dev/null | sed -n 's/^Version: \([0-9]*\).*/\1/p' |
        sort -n | tail -n 1 | grep . || die "no PostgreSQL is installed, and apt knows of none"
}

# pg_path OPTION: what pg_config says, or what it would say on Debian if it
# were installed already.
pg_path() {
    local root=${PG_CONFIG%/bin/pg_config}
    if [ -x "$PG_CONFIG" ]; then
        "$PG_CONFIG" "--$1"
        return
    fi
    case $1 in
        bindir) echo "$root/bin" ;;
        sharedir) echo "/usr/share/postgresql/${root##*/}" ;;
        pgxs) echo "$root/lib/pgxs/src/makefiles/pgxs.mk" ;;
        version) echo "PostgreSQL ${root##*/}" ;;
    esac
}

pg_major() { pg_path version | sed 's/^[^0-9]*\([0-9]*\).*/\1/'; }

apt_update() {
    apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update >/dev/null || note "apt's lists could not be brought up to date"
}

# python_with MODULE: print a Python that has it; Debian's packages are those of
# Debian's own, which need not come first on the path.
python_with() {
    local python
    for python in python3 /usr/bin/python3; do
        if "$python" -c "import $1" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

# missing_tools: read "WHAT PACKAGE" lines, print those of which WHAT (a path, a
# Perl module, "import:" and a Python module, or a command) is not there.
# PACKAGE is '-' if none can help.
missing_tools() {
    local what package
    while read -r what package; do
        case $what in
            '') ;;
            /*) [ -e "$what" ] || echo "$what $package" ;;
            import:*) python_with "${what#import:}" >/dev/null || echo "$what $package" ;;
            *::*) perl "-M$what" -e 1 2>/dev/null || echo "$what $package" ;;
            *) command -v "$what" >/dev/null || echo "$what $package" ;;
        esac
    done
}

# install_packages PACKAGE...: Debian's server package makes a server of its
# own, "main", and starts it; nobody asked for that here, so it is told not to.
install_packages() (
    no_main=/etc/postgresql-common/createcluster.d/no-main.conf
    mkdir -p "${no_main%/*}"
    trap 'rm -f "$no_main"' EXIT
    echo 'create_main_cluster = false' >"$no_main"
    DEBIAN_FRONTEND=noninteractive apt-get -qq --yes --no-install-recommends \
        -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install "$@" >/dev/null
)

# want_tools LIST: install the packages of what is missing if that can be done
# here, and print what is missing still.
want_tools() {
    local missing
    local -a packages
    missing=$(missing_tools <<<"$1")
    mapfile -t packages < <(cut -s -d' ' -f2 <<<"$missing" | grep -vx -- - | sort -u)
    if [ "${#packages[@]}" -gt 0 ] && is_root && command -v apt-get >/dev/null; then
        note "installing ${packages[*]}"
        apt_update
        install_packages "${packages[@]}" || true
        hash -r
        missing=$(missing_tools <<<"$1")
    fi
    awk 'NF { print "  " $1 ($2 == "-" ? "" : " (package " $2 ")") }' <<<"$missing"
}

# need_tools LIST: the same, and stop if anything is missing still.
need_tools() {
    local missing
    missing=$(want_tools "$1")
    [ -z "$missing" ] || die "missing:"$'\n'"$missing"
}

# list_files DIR: the project's files there, each ended by a NUL: what git does
# not ignore, or in an unpacked archive everything but built objects.
list_files() {
    if [ -e "$1/.git" ] && command -v git >/dev/null; then
        git -C "$1" -c safe.directory='*' ls-files -z --cached --others --exclude-standard
    else
        (cd "$1" && find . -type f ! -name '*.o' ! -name '*.bc' ! -name '*.so' -printf '%P\0')
    fi
}

# copy_tree FROM TO: files deleted from the work tree but not from git's index
# are no error.
copy_tree() {
    list_files "$1" | tar -C "$1" --null --verbatim-files-from --files-from=- \
        --ignore-failed-read --warning=no-failed-read -cf - | tar -C "$2" -xf -
}
