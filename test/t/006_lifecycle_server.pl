# The life of the extension and of the sessions that use it, where more than
# one session or a server's start comes into it.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('lifecycle', start => 0);

#
# With shared_preload_libraries and without.
#
foreach my $preload ('', 'idempotency')
{
	my $name = $preload ? 'preloaded' : 'not preloaded';
	$node->append_conf('postgresql.conf', "shared_preload_libraries = '$preload'\n");
	$node->start;
	my $s = session($node);
	$s->value('DROP EXTENSION IF EXISTS idempotency; CREATE EXTENSION idempotency');
	$s->close;
	$s = session($node);
	my $token = $s->value(q{SELECT token FROM idem_claim('k', '{"a": 1}', lease => '1 h')});
	is($s->value(qq{SELECT idem_checkpoint('k', $token, 'c') = lease_until FROM idem_get('k')}), 't', "$name: a checkpoint");
	is($s->value(qq{SELECT idem_complete('k', '1', $token)}), 't', "$name: a completion");
	is($s->value(q{SELECT outcome, response FROM idem_claim('k', '{"a": 1}')}), 'completed|1', "$name: a replay");
	is($s->value(q{SHOW idempotency.default_ttl}), '1d', "$name: settings are there");
	is_sqlstate($s, q{SET idempotency.nonsense = 1}, '42602', "$name: and no others");
	$s->close;

	# A setting made before the library was loaded is checked when it is.
	$s = session($node);
	if ($preload)
	{
		is_sqlstate($s, q{SET idempotency.default_lease = 'soon'}, '22023', "$name: a bad value is refused");
	}
	else
	{
		$s->value(q{SET idempotency.default_lease = 'soon'});
		$s->value(q{SELECT idem_claim('d')});
		is($s->value(q{SELECT lease_until - claimed_at FROM idempotency_keys WHERE key = 'd'}), '00:05:00',
			"$name: and the default counts");
	}
	$s->value(q{SET idempotency.default_lease = '7 s'});
	$s->value(q{SELECT idem_claim('e')});
	is($s->value(q{SELECT lease_until - claimed_at FROM idempotency_keys WHERE key = 'e'}), '00:00:07',
		"$name: a good one counts");
	$s->close;
	$node->stop;
}
$node->start;

my ($s, $other, $admin) = map { session($node) } 1 .. 3;

#
# DROP, CREATE and ALTER EXTENSION under a session that has everything cached,
# prepared statements included (whose result must not be of a type that is
# dropped; PostgreSQL sees to that).
#
$s->value(q{PREPARE claim(text) AS SELECT outcome::text, attempt FROM idem_claim($1)});
$s->value(q{PREPARE complete(text) AS SELECT idem_complete($1, '1')});
is($s->value(q{EXECUTE claim('cached')}), 'claimed|1', 'a prepared claim');
$other->value('DROP EXTENSION idempotency');
is_sqlstate($s, q{EXECUTE claim('cached')}, '42883', 'dropped by another session: a clear error');
is_sqlstate($s, q{SELECT idem_claim('cached')}, '42883', 'the same without a prepared statement');
$other->value('CREATE EXTENSION idempotency');
is($s->value(q{EXECUTE claim('cached')}), 'claimed|1', 'created anew: the prepared claim works, on the new table');
is($s->value(q{EXECUTE claim('cached')}), 'processing|1', 'and again');
$other->value('BEGIN; DROP EXTENSION idempotency; CREATE EXTENSION idempotency; ROLLBACK');
is($s->value(q{EXECUTE claim('cached')}), 'processing|1', 'dropped and created, then rolled back: as before');
$other->value('CREATE SCHEMA elsewhere; ALTER EXTENSION idempotency SET SCHEMA elsewhere');
is($s->value(q{SET search_path = elsewhere; EXECUTE claim('cached')}), 'processing|1', 'moved to another schema: the same key');
$other->value('ALTER EXTENSION idempotency SET SCHEMA public; DROP SCHEMA elsewhere');
is($s->value(q{SET search_path = public; EXECUTE claim('cached')}), 'processing|1', 'and moved back');
$other->value(q{ALTER TABLE idempotency_keys ADD COLUMN tenant int DEFAULT 7});
is($s->value(q{EXECUTE claim('with column')}), 'claimed|1', 'with a column that somebody added');
is($s->value(q{SELECT tenant FROM idempotency_keys WHERE key = 'with column'}), '7', 'which gets its default');
$other->value(q{VACUUM FULL idempotency_keys});
is($s->value(q{EXECUTE claim('cached')}), 'processing|1', 'after VACUUM FULL');
$other->value(q{REINDEX TABLE idempotency_keys});
is($s->value(q{EXECUTE claim('cached')}), 'processing|1', 'after REINDEX');
$other->value(q{TRUNCATE idempotency_keys});
is($s->value(q{EXECUTE claim('cached')}), 'claimed|1', 'after TRUNCATE');
$other->value(q{ALTER TABLE idempotency_keys SET UNLOGGED});
is_sqlstate($s, q{EXECUTE claim('cached')}, '55000', 'altered in a way that breaks the promises: refused');
$other->value(q{ALTER TABLE idempotency_keys SET LOGGED});
is($s->value(q{EXECUTE claim('cached')}), 'processing|1', 'and taken back');

# A transaction that has used the table keeps it to its end.
$s->value(q{BEGIN; SELECT idem_claim('held back')});
$other->send('DROP EXTENSION idempotency');
wait_until(
	sub {
		$admin->value(q{SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = } . $other->pid) eq '1';
	},
	'DROP EXTENSION to wait');
is($s->value(q{SELECT idem_complete('held back', '1')}), 't', 'DROP EXTENSION waits for a transaction with a claim');
$s->value('COMMIT');
ok(!$other->result->{error}, 'and goes on when it has ended');
$other->value('CREATE EXTENSION idempotency');

# One that waits for a key holds nothing, so nobody has to wait for it.
$s->value(q{SELECT idem_claim('dropped', lease => '1 h')});
$s->send(q{SELECT outcome FROM idem_claim('dropped', wait => '10 min')});
wait_for_sleep($admin, $s);
$other->value('DROP EXTENSION idempotency');
my $result = $s->result;
is($result->{error} && $result->{error}{C}, '42704', 'a waiter whose extension is dropped ends with a clear error');
$other->value('CREATE EXTENSION idempotency');
is($s->value(q{SELECT outcome FROM idem_claim('dropped')}), 'claimed', 'and its session goes on with the new one');

$s->value(q{SELECT idem_claim('moved', lease => '1 h')});
$s->send(q{SELECT outcome, response FROM idem_claim('moved', wait => '10 min')});
wait_for_sleep($admin, $s);
$other->value('CREATE SCHEMA elsewhere; ALTER EXTENSION idempotency SET SCHEMA elsewhere');
$other->value(q{SELECT elsewhere.idem_complete('moved', '"there"', token) FROM elsewhere.idempotency_keys WHERE key = 'moved'});
is($s->fetch, 'completed|"there"', 'a waiter whose extension moves gets its answer');
$other->value('ALTER EXTENSION idempotency SET SCHEMA public; DROP SCHEMA elsewhere');

#
# A wait that is cut short leaves nothing behind.
#
$other->value(q{SELECT idem_claim('waited', lease => '1 h')});

sub nothing_left
{
	my ($name) = @_;
	is($admin->value(q{SELECT count(*) FROM pg_locks
					   WHERE locktype = 'advisory' AND database <> 0 OR relation IN ('idempotency_keys'::regclass, 'idempotency_keys_pkey'::regclass)}),
		'0', "$name: no lock is left");
	is($admin->value(q{SELECT idem_renew('waited', token, '1 h') IS NOT NULL FROM idempotency_keys WHERE key = 'waited'}), 't',
		"$name: and the key is as usable as before");
	return;
}

my $waiting_claim = q{SELECT outcome FROM idem_claim('waited', wait => '10 min')};
foreach my $begin ('', 'BEGIN; ')
{
	my $where = $begin ? 'in a transaction' : 'by itself';
	my $w = session($node);
	$w->send("$begin$waiting_claim");
	wait_for_sleep($admin, $w);

	# It looks at the key from time to time, and has a lock for that long.
	my $locks = 'SELECT count(*) FROM pg_locks WHERE locktype <> ' . sql_quote('virtualxid') . ' AND pid = ' . $w->pid;
	ok(wait_until(sub { $admin->value($locks) eq '0' }, 'a waiter that has no lock'), "$where: a waiter holds no lock");
	is($admin->value('SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid = ' . $w->pid), '0',
		"$where: nor a transaction id");
	$admin->value('SELECT pg_terminate_backend(' . $w->pid . ')');
	is($w->result->{error}{C}, '57P01', "$where: a waiter can be terminated");
	wait_until(sub { $admin->value('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $w->pid) eq '0' }, 'it to be gone');
	nothing_left("$where, terminated");

	$w = session($node);
	$w->send("$begin$waiting_claim");
	wait_for_sleep($admin, $w);
	$admin->value('SELECT pg_cancel_backend(' . $w->pid . ')');
	is($w->result->{error}{C}, '57014', "$where: a waiter can be cancelled");
	$w->value('ROLLBACK');
	nothing_left("$where, cancelled");
	is($w->value(q{SELECT outcome FROM idem_claim('waited')}), 'processing', "$where: and its session goes on");

	$w->value('SET statement_timeout = 300');
	is_sqlstate($w, "$begin$waiting_claim", '57014', "$where: statement_timeout ends a wait");
	$w->value('ROLLBACK; RESET statement_timeout');
	nothing_left("$where, timed out");

	$w->send("$begin$waiting_claim");
	wait_for_sleep($admin, $w);
	$w->close;
	$admin->value('SELECT pg_terminate_backend(' . $w->pid . ')');
	wait_until(sub { $admin->value('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $w->pid) eq '0' }, 'it to be gone');
	nothing_left("$where, the client went away");
}

# A cancelled claim in a savepoint does not spoil the transaction around it.
$s->value(q{BEGIN; SELECT idem_claim('outer'); SAVEPOINT a; SET LOCAL statement_timeout = 300});
is_sqlstate($s, $waiting_claim, '57014', 'a wait in a savepoint is cancelled');
$s->value(q{ROLLBACK TO a; SELECT idem_complete('outer', '1'); COMMIT});
is($s->value(q{SELECT outcome FROM idem_claim('outer')}), 'completed', 'and the claim outside it is completed');

# An owner that is terminated in its transaction frees its key at once.
my $owner = session($node);
$owner->value(q{BEGIN; SELECT idem_claim('freed', lease => '1 h')});
$s->send(q{SELECT outcome, attempt FROM idem_claim('freed', wait => '10 min')});
wait_for_sleep($admin, $s);
$admin->value('SELECT pg_terminate_backend(' . $owner->pid . ')');
is($s->fetch, 'claimed|1', 'an owner that dies in its transaction hands the key on');

# Temporary objects go with their session, and nobody takes them for ours.
$s->value(q{CREATE TEMPORARY TABLE idempotency_keys (key text)});
is($s->value(q{SELECT outcome FROM idem_claim('not in pg_temp')}), 'claimed', 'a temporary table of the same name is ignored');
$s->value('DISCARD ALL');
is($s->value(q{SELECT outcome FROM idem_claim('not in pg_temp')}), 'processing', 'DISCARD ALL changes nothing');

#
# CREATE EXTENSION where something of the same name is there already.
#
my %in_the_way = (
	'a table' => [ 'TABLE idempotency_keys', 'CREATE TABLE idempotency_keys (key text)', '42P07' ],
	'a view' => [ 'VIEW idempotency_keys', 'CREATE VIEW idempotency_keys AS SELECT 1', '42P07' ],
	'a sequence' => [ 'SEQUENCE idempotency_keys_token_seq', 'CREATE SEQUENCE idempotency_keys_token_seq', '42P07' ],
	'a function' => [
		'FUNCTION idem_get(text, text)',
		q{CREATE FUNCTION idem_get(key text, scope text DEFAULT '') RETURNS int LANGUAGE sql AS 'SELECT 1'}, '42723' ],
	'a type' => [ 'TYPE idem_status', q{CREATE TYPE idem_status AS ENUM ('mine')}, '42710' ],
	'a domain' => [ 'DOMAIN idem_outcome', q{CREATE DOMAIN idem_outcome AS text}, '42710' ]);
$admin->value('CREATE DATABASE occupied');
my $o = session($node, dbname => 'occupied');
foreach my $what (sort keys %in_the_way)
{
	my ($object, $create, $sqlstate) = @{ $in_the_way{$what} };
	$o->value($create);
	is_sqlstate($o, 'CREATE EXTENSION idempotency', $sqlstate, "$what in the way: refused");
	is($o->value(q{SELECT count(*) FROM pg_extension WHERE extname = 'idempotency'}), '0', "$what in the way: no extension");
	is($o->value(q{SELECT count(*) FROM pg_depend WHERE deptype = 'e' AND refobjid NOT IN (SELECT oid FROM pg_extension)}), '0',
		"$what in the way: nothing of one either");
	$o->value("DROP $object");
	is($o->value(q{SELECT count(*) FROM pg_class WHERE relname ~ '^idem'}), '0', "$what in the way: no relation is left");
	$o->value('CREATE EXTENSION idempotency');
	is($o->value(q{SELECT outcome FROM idem_claim('k')}), 'claimed', "$what out of the way: it works");
	$o->value('DROP EXTENSION idempotency');
	is($o->value(q{SELECT (SELECT count(*) FROM pg_class WHERE relname ~ '^idem') + (SELECT count(*) FROM pg_proc WHERE proname ~ '^idem')
					+ (SELECT count(*) FROM pg_type WHERE typname ~ '^_?idem')}), '0', "$what: DROP EXTENSION leaves nothing");
}

# Others than superusers can't create it, but use it where it is.
$o->value('CREATE ROLE plain LOGIN; GRANT CREATE ON SCHEMA public TO plain; GRANT CREATE ON DATABASE occupied TO plain');
my $plain = session($node, dbname => 'occupied', user => 'plain');
is_sqlstate($plain, 'CREATE EXTENSION idempotency', '42501', 'a plain role cannot create the extension');

#
# REINDEX CONCURRENTLY, which may take long: its copy of the primary key is unique
# and written, and not valid.
#
{
	my ($open, $reindexing) = map { session($node, dbname => 'occupied') } 1 .. 2;
	$o->value('CREATE EXTENSION idempotency');
	$open->value('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class');
	$reindexing->send('REINDEX TABLE CONCURRENTLY idempotency_keys');
	wait_until(
		sub { $o->value(q{SELECT count(*) FROM pg_index WHERE indrelid = 'idempotency_keys'::regclass AND indisunique AND indisready AND NOT indisvalid}) eq '1' },
		'the copy to be written');
	my $use = sub {
		my ($key) = @_;
		return $o->value(qq{SELECT outcome, idem_complete('$key', '1', token, ttl => '1 us') FROM idem_claim('$key')})
			. $o->value('SELECT pg_sleep(0.02), idem_sweep()');
	};
	is($use->('during'), 'claimed|t|1', 'claims, results and sweeps during REINDEX CONCURRENTLY');
	$admin->value('SELECT pg_cancel_backend(' . $reindexing->pid . ')');
	is($reindexing->result->{error}{C}, '57014', 'which is cancelled');
	is($use->('after'), 'claimed|t|1', 'and with the copy that it leaves');
	$_->close foreach $open, $reindexing;
	$o->value('DROP EXTENSION idempotency');
}

#
# Dropped and created anew while a call waits: its result's type is no more.
#
my $other = session($node, dbname => 'occupied');
foreach my $call (q{idem_claim('k', wait => '10 min')}, q{idem_execute('k', 'SELECT 1', wait => '10 min')}, q{idem_execute('k', 'SELECT 1')})
{
	$o->value('CREATE EXTENSION IF NOT EXISTS idempotency');
	$o->value(q{SELECT idem_claim('k', lease => '1 h')});
	$other->send("SELECT outcome FROM $call");
	wait_for_sleep($o, $other);
	$o->value('BEGIN; DROP EXTENSION idempotency; CREATE EXTENSION idempotency; COMMIT');
	is($other->result->{error}{C}, '42704', "the extension is replaced while $call waits");
	is($other->value('SELECT outcome FROM idem_claim(\'k\')'), 'claimed', 'the session goes on with the new one');
	$o->value('DROP EXTENSION idempotency');
}

no_faults($node);
$node->stop;
done_testing();
