# shellcheck shell=bash
# server.sh - throw-away servers.  To be sourced after common.sh; it does nothing.
#
# A server listens on a socket in its own private folder and on no network
# port, so it can collide with nothing, and nobody else can reach it.  The
# caller sets $work (a folder of as_owner's) and $tree (the project), and calls
# server_stop on every way out.

: "${work=}" "${tree=}" "${server=}"

# as_owner COMMAND...: the server refuses to run as root, so root's part of the
# work is done by user postgres.  Descriptor 9 is the caller's lock, which a
# server that outlives the caller must not hold on to.
as_owner() {
    if is_root; then
        runuser -u postgres -- env HOME="$work" "$@" 9<&-
    else
        "$@" 9<&-
    fi
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
    grep -E 'PANIC:|TRAP:|terminated by signal|reference leak|leaked|was not closed|still referenced|not own (a )?lock|problem in alloc set|invalid memory alloc|could not open relation with OID|cache lookup failed' \
        "$server/log" || true
}
