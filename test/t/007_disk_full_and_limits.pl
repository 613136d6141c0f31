# Where the server comes to its limits: no room on disk, few locks, the ends of
# the number ranges.  A call that can't do its work fails cleanly, leaves the
# key as it was, and succeeds when there is room again.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

# A limit on the size of the files a backend may write stands for a full disk:
# the write that would make the table longer fails, part of the way.  The limit
# counts for WAL too, hence the small segments; and as pages must not be written
# before their time, there are buffers enough for all of them.
my $node = new_node('limits',
	init => { extra => ['--wal-segsize=1'] },
	conf => "shared_buffers = 64MB\nmax_locks_per_transaction = 10\nmax_connections = 20\n"
	  . "max_prepared_transactions = 0\nlog_statement = none\n");
my $admin = session($node);
my $amcheck = $admin->value(q{SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'});
$admin->value('CREATE EXTENSION amcheck') if $amcheck;

sub limit_files
{
	my ($session, $bytes) = @_;
	my $limit = defined $bytes ? "$bytes:" : 'unlimited:';
	system_or_bail('prlimit', '--pid', $session->pid, "--fsize=$limit");
	return;
}

# How much of a table's file may be written, if it must not get a page longer.
sub no_room_for
{
	my ($relation) = @_;
	return $admin->value("SELECT pg_relation_size($relation) + 4096");
}

sub intact
{
	my ($name) = @_;
	SKIP:
	{
		skip 'amcheck is not installed', 1 unless $amcheck;
		ok(!$admin->query(
				q{SELECT bt_index_check('idempotency_keys_pkey', true); SELECT * FROM verify_heapam('idempotency_keys')})->{error},
			"$name: table and index are intact");
	}
	return;
}

# A result that does not shrink when it is compressed.
my $large = q{(SELECT string_agg(sha256(n::text::bytea), '') FROM generate_series(1, 20000) n)};

SKIP:
{
	skip 'there is no program prlimit (package util-linux)', 18 if system('command -v prlimit >/dev/null');

	# The table grows past the size of a WAL segment.
	while ($admin->value(q{SELECT pg_relation_size('idempotency_keys') < 2 * 1024 * 1024}) eq 't')
	{
		$admin->value(q{SELECT idem_claim(gen_random_uuid()::text, operation => repeat('x', 255), lease => '1 h')
						FROM generate_series(1, 500)});
	}

	my $s = session($node);
	$s->value(q{SELECT idem_claim('warm'), idem_complete('warm', '1')});
	limit_files($s, no_room_for(q{'idempotency_keys'}));
	my ($n, $failed) = (0);
	until ($failed)
	{
		my $result = $s->query('SELECT outcome FROM idem_claim(' . sql_quote('full.' . ++$n)
			  . q{, operation => repeat('x', 255), lease => '1 h')});
		$failed = $result->{error};
		BAIL_OUT('the table always has room') if $n > 1000;
	}
	like($failed->{M}, qr/^could not extend file/, 'a claim for which there is no room fails');
	like($failed->{C}, qr/^(?:53100|XX000)$/, 'as the server says it of a full disk');
	is($admin->value("SELECT count(*) FROM idempotency_keys WHERE key = 'full.$n'"), '0', 'the key is not claimed');
	is($s->value(q{SELECT outcome FROM idem_claim('warm')}), 'completed', 'a replay needs no room');
	$s->value(q{BEGIN; SAVEPOINT a});
	ok($s->query("SELECT idem_claim('full.$n', operation => repeat('x', 255))")->{error}, 'it fails in a savepoint');
	$s->value('ROLLBACK TO a');
	is($s->value(q{SELECT outcome FROM idem_claim('warm')}), 'completed', 'which does not spoil its transaction');
	$s->value('COMMIT');
	is($admin->value(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database <> 0}), '0', 'no lock is left');
	intact('after a failed claim');
	limit_files($s);
	is($s->value("SELECT outcome, attempt FROM idem_claim('full.$n')"), 'claimed|1', 'with room again, it succeeds');

	# A result for which there is no room.
	my $token = $s->value(q{SELECT token FROM idem_claim('large', lease => '1 h')});
	my $toast = q{(SELECT reltoastrelid FROM pg_class WHERE oid = 'idempotency_keys'::regclass)};
	$s->value("SELECT idem_claim('large.' || n), idem_complete('large.' || n, body => $large) FROM generate_series(1, 5) n");
	limit_files($s, no_room_for($toast));
	my $complete = "SELECT idem_complete('large', body => $large, token => $token)";
	my $result = $s->query($complete);
	like($result->{error} && $result->{error}{M}, qr/^could not extend file/, 'a result for which there is no room');
	is($admin->value(q{SELECT status, attempt, body IS NULL FROM idem_get('large')}), 'processing|1|t',
		'the claim is still its owner\'s');
	is($s->value("SELECT idem_checkpoint('large', $token, 'no room') = lease_until FROM idem_get('large')"), 't',
		'who can do what needs no room');
	$s->value("BEGIN; SAVEPOINT a");
	ok($s->query($complete)->{error}, 'again, in a savepoint');
	$s->value("ROLLBACK TO a; SELECT idem_fail('large', '\"no room\"', $token, disposition => 'retry'); COMMIT");
	is($admin->value(q{SELECT status, response FROM idem_get('large')}), 'retryable|"no room"', 'after which the claim can be failed');
	intact('after a failed completion');
	limit_files($s);
	$token = $s->value(q{SELECT token FROM idem_claim('large')});
	is($s->value("SELECT idem_complete('large', body => $large, token => $token)"), 't', 'with room again, it succeeds');
	is($s->value("SELECT outcome, body = $large FROM idem_claim('large')"), 'completed|t', 'and is replayed as it was');
	intact('at last');
	$s->close;
}

#
# Few locks: a transaction may work on any number of keys.
#
my $many = session($node);
is($many->value(q{BEGIN; SELECT count(*), bool_and((c).outcome = 'claimed')
				  FROM (SELECT idem_claim('many.' || n) AS c FROM generate_series(1, 20000) n OFFSET 0) x}),
	'20000|t', 'one transaction claims 20000 keys');
cmp_ok($admin->value('SELECT count(*) FROM pg_locks WHERE pid = ' . $many->pid), '<', 10, 'and holds a handful of locks');
is($many->value(q{SELECT count(*) FILTER (WHERE idem_complete('many.' || n)) FROM generate_series(1, 20000) n}), '20000',
	'and completes them');
$many->value('COMMIT');
is($many->value(q{SELECT count(*) FROM idempotency_keys WHERE key LIKE 'many.%' AND status = 'completed'}), '20000',
	'all at once');
is($many->value(q{BEGIN; SELECT count(*) FROM (SELECT idem_claim('sub.' || n) FROM generate_series(1, 100) n OFFSET 0) x}), '100',
	'another one');
foreach my $n (1 .. 200)
{
	$many->value("SAVEPOINT s$n; SELECT idem_claim('savepoint.$n'); SELECT idem_complete('savepoint.$n', '$n')");
}
$many->value('ROLLBACK TO s101; COMMIT');
is($many->value(q{SELECT count(*) FROM idempotency_keys WHERE key LIKE 'savepoint.%'}), '100',
	'savepoints within savepoints: what was rolled back is gone');

#
# The ends of the ranges.
#
my $s = session($node);
$s->value(q{SELECT idem_claim('last attempt', lease => '1 ms')});
$s->value(q{UPDATE idempotency_keys SET attempt = 2147483647 WHERE key = 'last attempt'});
is($s->value(q{SELECT outcome, attempt FROM idem_claim('last attempt', wait => '1 s')}), 'claimed|2147483647',
	'the number of attempts stays at its end');

$s->value(q{SELECT idem_claim('far', ttl => '290000 years', lease => '290000 years')});
$s->value(q{SELECT idem_complete('far', '1', token) FROM idempotency_keys WHERE key = 'far'});
is($s->value(q{SELECT outcome, expires_at > '280000-01-01' FROM idem_claim('far')}), 'completed|t', 'a retention of 290000 years');
is_sqlstate($s, q{SELECT idem_claim('further', ttl => '300000 years')}, 'IK400', 'one that no timestamp can hold');

$s->value(q{SELECT idem_claim('no token', lease => '1 ms')});
my $last = $s->value(q{SELECT token FROM idem_claim('kept', lease => '1 h')});
$s->value(q{SELECT setval('idempotency_keys_token_seq', 9007199254740990)});
is($s->value(q{SELECT token FROM idem_claim('last token')}), '9007199254740991', 'the last token is 2^53 - 1');
is_sqlstate($s, q{SELECT idem_claim('beyond')}, '2200H', 'there is none after it');
is_sqlstate($s, q{SELECT idem_claim('no token', wait => '1 s')}, '2200H', 'nor for a take-over');
is($s->value(q{SELECT count(*) FROM idempotency_keys WHERE key = 'beyond' OR key = 'no token' AND attempt > 1}), '0',
	'which changes nothing');
is($s->value(q{SELECT outcome FROM idem_claim('far')}), 'completed', 'replays go on');
is($s->value(qq{SELECT idem_complete('kept', '1', $last)}), 't', 'and so do completions');

no_faults($node);
$node->stop;
done_testing();
