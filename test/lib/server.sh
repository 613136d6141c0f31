# shellcheck shell=bash
# server.sh - the extension on throw-away servers: what it takes to build it, to
# install it, to run a server.  To be sourced after common.sh; it does nothing.
#
# A server listens on a socket in its own private folder and on no network
# port, so it can collide with nothing, and nobody else can reach it.  The
# caller sets $work (a folder of as_owner's) and $tree (the project), and calls
# server_stop on every way out.

: "${work=}" "${tree=}" "${server=}"

# as_owner COMMAND...: the server refuses to run as root, so root's part of the
# work is done by user postgres.  Descriptor 9 is the caller's lock, 3 its
# output; a server that outlives the caller must not hold on to either.
as_owner() {
    if is_root; then
        runuser -u postgres -- env HOME="$work" "$@" 3>&- 9<&-
    else
        "$@" 3>&- 9<&-
    fi
}

# build_tools: what a build and a server need, as need_tools takes it.  A server
# that is not Debian's has to bring its own part.
build_tools() {
    local server_package=- headers=-
    if is_packaged; then
        server_package=postgresql-$(pg_major) headers=postgresql-server-dev-$(pg_major)
    fi
    cat <<LIST
$(pg_path bindir)/postgres $server_package
$(pg_path pgxs) $headers
/usr/include/stdio.h libc6-dev
gcc gcc
make make
flock util-linux
LIST
}

# lock_installation: only one at a time can use the extension that is installed
# for a server.  The lock lasts until the caller ends or closes descriptor 9.
lock_installation() {
    exec 9<"$(pg_path pkglibdir)"
    flock --nonblock 9 || { note "waiting for another run for this server"; flock 9; }
}

# build_extension [VARIABLE...]: build $tree and install it, with lock_installation.
build_extension() {
    as_owner make --no-print-directory -C "$tree" -j"$(nproc)" "$@" || return
    make --no-print-directory -C "$tree" install ||
        { echo "*** $(id -un) cannot install into $(pg_path pkglibdir): run as root, or name a server of your own in PG_CONFIG"; return 1; }
}

# server_start NAME [LINE...]: make and start the server NAME with
# test/idempotency.conf and the further LINEs of configuration, and point the
# environment at it.
server_start() {
    server=$work/$1
    shift
    as_owner mkdir -m 0700 "$server" || return
    as_owner initdb --no-sync --no-instructions --auth=trust --username=postgres \
        --encoding=UTF8 --locale=C -D "$server/data" >"$server/initdb.log" 2>&1 ||
        { cat "$server/initdb.log"; return 1; }
    {
        cat "$tree/test/idempotency.conf"
        printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$server'" "port = 54321" "$@"
    } >>"$server/data/postgresql.conf"
    export PGHOST=$server PGPORT=54321 PGUSER=postgres PGDATABASE=postgres
    as_owner pg_ctl --silent --wait -D "$server/data" -l "$server/log" start ||
        { tail -n 20 "$server/log"; return 1; }
}

# server_stop: quietly nothing if none runs.
server_stop() {
    [ -n "$server" ] || return 0
    if [ -e "$server/data/postmaster.pid" ]; then
        as_owner pg_ctl --silent --wait --mode=fast -D "$server/data" stop ||
            as_owner pg_ctl --silent --wait --mode=immediate -D "$server/data" stop || true
    fi
    server=
}

# server_faults: print the lines of the server's log that no test may cause: a
# crash, a failed assertion, and what PostgreSQL warns of when C code forgets
# to give back a buffer, a snapshot, a cache entry or a lock.
server_faults() {
    grep -E -e 'PANIC:|TRAP:|terminated by signal|problem in alloc set' \
        -e 'WARNING: .*( leak|not closed|non-empty SPI stack|don.t own a lock)' \
        -e 'WARNING: .*(snapshot .* still active|snapshots seem to remain)' \
        -e 'cache lookup failed|could not open relation with OID' "$server/log" || true
}
