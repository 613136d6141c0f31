# shellcheck shell=bash
# The throw-away server every command here runs against.
#
# Sourced, not run.  Everything lives in one temporary directory, which is removed with the server when the script
# ends, whatever ended it.  The server listens on a socket in that directory only, so neither its port nor its name can
# collide with anything on the machine.

set -euo pipefail

bench_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PG_CONFIG=${PG_CONFIG:-pg_config}
bindir=$("$PG_CONFIG" --bindir)
work=$(mktemp -d -t idempotency-bench.XXXXXX)
data=$work/data

# A server refuses to run as root, so as root its processes are given to the user postgres; clients stay what they are.
as_server()
{
	if [ "$(id -u)" -eq 0 ]; then
		(cd "$work" && exec runuser -u postgres -- "$@")
	else
		(cd "$work" && exec "$@")
	fi
}

# die MESSAGE [FILE...]: the ends of the files tell why
die()
{
	local message=$1
	shift
	if [ "$#" -gt 0 ]; then
		tail -n 20 "$@" >&2
	fi
	echo "${0##*/}: $message" >&2
	exit 1
}

cleanup()
{
	if [ -f "$data/postmaster.pid" ]; then
		as_server "$bindir/pg_ctl" -D "$data" -m immediate -s stop || true
	fi
	# Under valgrind a process writes its counts after the postmaster is gone.
	local _
	for _ in $(seq 50); do
		rm -rf "$work" 2>/dev/null && return
		sleep 0.2
	done
	rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

if [ "$(id -u)" -eq 0 ]; then
	chown postgres "$work"
fi

# The clients' side of the connection; nothing inherited may point a benchmark at a real server.
unset PGHOSTADDR PGPASSWORD PGSERVICE PGOPTIONS PGSSLMODE PGPASSFILE PGAPPNAME
export PGHOST=$work PGPORT=5432 PGUSER=postgres PGDATABASE=postgres

# Is the extension there?  It is installed if it can be, nothing else is ever built.
have_extension()
{
	local control
	control=$("$PG_CONFIG" --sharedir)/extension/idempotency.control
	if [ ! -f "$control" ] && [ -f "$bench_dir/../Makefile" ]; then
		make -s -C "$bench_dir/.." install PG_CONFIG="$PG_CONFIG" >"$work/make.log" 2>&1 || true
	fi
	[ -f "$control" ]
}

# Make the cluster; the arguments are lines for postgresql.conf.
# C locale: comparing keys then costs the table of the blogs no more than it costs the extension.
# No checksums: with them the first reader of a row writes WAL for its hint bits, which is not the reader's doing.
server_init()
{
	local -a options=(--auth=trust --username=postgres --no-sync --no-locale --encoding=UTF8)
	if "$bindir/initdb" --help | grep -q -e --no-data-checksums; then
		options+=(--no-data-checksums)
	fi
	as_server "$bindir/initdb" "${options[@]}" -D "$data" >"$work/initdb.log" || die "initdb failed" "$work/initdb.log"
	printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$work'" "port = $PGPORT" \
		"autovacuum = off" "$@" >>"$data/postgresql.conf"
}

server_start()
{
	as_server "$bindir/pg_ctl" -D "$data" -l "$work/log" -s -w start || die "no server" "$work/log"
}

server_stop()
{
	as_server "$bindir/pg_ctl" -D "$data" -m fast -s -w -t 300 stop
}

# Each backend leaves its counts in $work/callgrind.PID when it exits.  Counting starts with PostgresMain, so that a
# backend does not inherit what the postmaster had counted when it forked.
server_start_callgrind()
{
	as_server valgrind --quiet --tool=callgrind --toggle-collect=PostgresMain \
		--callgrind-out-file="$work/callgrind.%p" \
		"$bindir/postgres" -D "$data" >>"$work/log" 2>&1 &
	local _
	for _ in $(seq 600); do
		"$bindir/pg_isready" -q && return
		sleep 0.1
	done
	die "no server under valgrind" "$work/log"
}

sql()
{
	"$bindir/psql" -XAtq -v ON_ERROR_STOP=1 "$@"
}
