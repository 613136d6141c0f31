# shellcheck shell=bash source-path=SCRIPTDIR
# What each contestant keeps and what its client sends, side by side.
#
#   F  the floor: nothing but a row by primary key; no rival can do with less
#   A  the table every blog shows, driven by the client; the hash is the client's work and is not measured
#   H  the extension used as A is: the hash is the client's work, the response jsonb
#   I  the extension, given the request as jsonb, which the server parses and fingerprints; response jsonb
#   S  the extension, hash given by the caller, result stored as bytes
#
# A client asks for the columns it needs, here as there.
#
# Every statement is prepared once and gets its values as parameters (pgbench -M prepared).

# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# shellcheck disable=SC2034  # for those who print
declare -A label=([F]=F [A]=A [H]="idem, hash" [I]="idem, jsonb" [S]="idem, bytes")

# Roughly 200 bytes, as a payment request has.
request='{"order":"ord-20240117-000123","customer":"cus_9f8a71c3","amount":{"value":12990,"currency":"EUR"},'
request+='"items":[{"sku":"A-100","qty":2},{"sku":"B-200","qty":1}],"note":"leave it at the door"}'
other_request=${request/12990/12991}

# A hash of the right length is all that matters here, nobody looks at what it was made from.
hash=$(printf '%s' "$request" | sha256sum | cut -c1-64)
other_hash=$(printf '%s' "$other_request" | sha256sum | cut -c1-64)

response_100='{"payment":"pay_5f0c2e9b7a","status":"succeeded","amount":12990,"currency":"EUR","fee":12.5,"ok":true}'

# 4 KB as lists of an API's answers look: names repeat, values don't.
response_4k()
{
	awk 'BEGIN {
		x = 7
		printf "{\"items\":["
		for (i = 0; i < 44; i++)
		{
			x = (x * 16807) % 2147483647
			printf "%s{\"id\":\"it-%08x\",\"sku\":\"S-%05d\",\"qty\":%d,\"price\":%d.%02d,\"state\":\"reserved\",\"lot\":\"%06d\"}",
				i ? "," : "", x, x % 99991, x % 9 + 1, x % 500, x % 89 + 10, x % 999983
		}
		printf "]}"
	}'
}
response_4k=$(response_4k)

hex()
{
	printf '\\x'
	printf '%s' "$1" | od -An -v -tx1 | tr -d ' \n'
}

tables()
{
	cat <<-'SQL'
		CREATE TABLE f (key text PRIMARY KEY, request_hash bytea NOT NULL, status text NOT NULL, response jsonb,
		                created_at timestamptz NOT NULL DEFAULT now());
		CREATE TABLE a (key varchar(255) PRIMARY KEY, request_hash varchar(64) NOT NULL, status varchar(20) NOT NULL,
		                response jsonb, created_at timestamptz NOT NULL DEFAULT now(), expires_at timestamptz NOT NULL);
		CREATE INDEX ON a (expires_at);
	SQL
}

# The key: 19 digits in no order, so that the index is hit all over; one sequence of keys per client.
key_of='(hash(:n + 100000000 * :client_id, 1) & 4611686018427387903) + 4000000000000000000'
new_key="\\set n :n + 1
\\set key $key_of"
# A key that was loaded by client 0 as number :first to :last.
old_key="\\set n random(:first, :last)
\\set key (hash(:n, 1) & 4611686018427387903) + 4000000000000000000"

a_claim="INSERT INTO a (key, request_hash, status, expires_at)
VALUES (:key, :hash, 'processing', now() + interval '24 hours') ON CONFLICT (key) DO NOTHING;"
# Having lost the key, A's client has to ask for the row; it compares the hash by itself, so a mismatch costs the same.
a_replay="$a_claim
SELECT request_hash, status, response FROM a WHERE key = :key;"

by_request="FROM idem_claim(key => :key, request => :request)"
by_other_request="FROM idem_claim(key => :key, request => :other_request)"
by_hash="FROM idem_claim(key => :key, request_hash => :bytes_hash)"
by_other_hash="FROM idem_claim(key => :key, request_hash => :other_bytes_hash)"

# script CONTESTANT OPERATION: the pgbench script; "complete" is a claim and its completion, two transactions.
script()
{
	case $1-$2 in
		*-claim | *-complete) echo "$new_key" ;;
		*) echo "$old_key" ;;
	esac
	case $1-$2 in
		F-claim | F-complete)
			echo "INSERT INTO f (key, request_hash, status) VALUES (:key, :bytes_hash, 'processing');" ;;
		F-replay) echo "SELECT status, response FROM f WHERE key = :key;" ;;
		A-claim | A-complete) echo "$a_claim" ;;
		A-replay | A-mismatch) echo "$a_replay" ;;
		H-claim | H-replay) echo "SELECT outcome, token, response $by_hash;" ;;
		H-complete) echo "SELECT outcome, token, response $by_hash \\gset got_" ;;
		H-mismatch) echo "SELECT outcome, token, response $by_other_hash;" ;;
		I-claim | I-replay) echo "SELECT outcome, token, response $by_request;" ;;
		I-complete) echo "SELECT outcome, token, response $by_request \\gset got_" ;;
		I-mismatch) echo "SELECT outcome, token, response $by_other_request;" ;;
		S-claim | S-replay) echo "SELECT outcome, token, body $by_hash;" ;;
		S-complete) echo "SELECT outcome, token, body $by_hash \\gset got_" ;;
		S-mismatch) echo "SELECT outcome, token, body $by_other_hash;" ;;
		*) die "no script for $1-$2" ;;
	esac
	case $1-$2 in
		F-complete | A-complete) echo "UPDATE ${1,} SET status = 'completed', response = :response WHERE key = :key;" ;;
		H-complete | I-complete) echo "SELECT idem_complete(key => :key, response => :response, token => :got_token);" ;;
		S-complete) echo "SELECT idem_complete(key => :key, body => :body, token => :got_token);" ;;
	esac
}

# The forms of the extension share one table, so they get different numbers.
first_number()
{
	case $1 in
		S) echo 50000000000 ;;
		H) echo 80000000000 ;;
		*) echo 0 ;;
	esac
}

values=(-D request="$request" -D other_request="$other_request"
	-D hash="$hash" -D bytes_hash="\\x$hash" -D other_bytes_hash="\\x$other_hash")
small=(-D response="$response_100" -D body="$(hex "$response_100")")
big=(-D response="$response_4k" -D body="$(hex "$response_4k")")

# run FILE OPTIONS...: pgbench with everything the scripts name; a later -D overrides.  Its report is left in
# $work/pgbench.log.  An error of any statement ends the benchmark.
run()
{
	local file=$1
	shift
	"$bindir/pgbench" -n -M prepared --random-seed=1 -f "$file" "${values[@]}" "${small[@]}" "$@" \
		>"$work/pgbench.log" 2>"$work/pgbench.err" ||
		die "pgbench failed" "$file" "$work/pgbench.err" "$work/log"
}

# load CONTESTANT: completed keys to replay, numbers 1 to loaded_100 with 100 bytes, then up to loaded with 4 KB.
loaded_100=4000
loaded=5000
load()
{
	local first
	first=$(first_number "$1")
	script "$1" complete >"$work/load.sql"
	run "$work/load.sql" -t "$loaded_100" -D n="$first"
	run "$work/load.sql" -t $((loaded - loaded_100)) -D n=$((first + loaded_100)) "${big[@]}"
}

# The extension counts replays as well as claims: a benchmark of wrong answers would be worse than none.
check_answers()
{
	local bad
	bad=$(sql -c "
		SELECT form, got.outcome, got.response IS NULL, got.body IS NULL
		  FROM (SELECT (array_agg(key) FILTER (WHERE octet_length(request_hash) = 33))[1] AS of_i,
		               (array_agg(key) FILTER (WHERE response IS NOT NULL AND octet_length(request_hash) = 32))[1] AS of_h,
		               (array_agg(key) FILTER (WHERE body IS NOT NULL))[1] AS of_s FROM idempotency_keys) k,
		       LATERAL (SELECT 'I', 'completed', * FROM idem_claim(of_i, '$request')
		                UNION ALL SELECT 'I', 'mismatch', * FROM idem_claim(of_i, '$other_request')
		                UNION ALL SELECT 'H', 'completed', * FROM idem_claim(of_h, request_hash => '\\x$hash')
		                UNION ALL SELECT 'H', 'mismatch', * FROM idem_claim(of_h, request_hash => '\\x$other_hash')
		                UNION ALL SELECT 'S', 'completed', * FROM idem_claim(of_s, request_hash => '\\x$hash')
		                UNION ALL SELECT 'S', 'mismatch', * FROM idem_claim(of_s, request_hash => '\\x$other_hash')
		               ) got (form, expected, outcome)
		 WHERE got.outcome::text <> got.expected")
	[ -z "$bad" ] || die "the extension does not answer as it should: $bad"
}
