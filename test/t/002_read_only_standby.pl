# Where nothing can be written: a standby, a read-only transaction, and a
# standby that becomes the primary.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Cluster;
use Test::More;

my $primary = new_node('primary',
	init => { allows_streaming => 1 },
	conf => "max_connections = 50\nshared_buffers = 16MB\n");
$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
$standby->start;

my $p = session($primary);
my $s = session($standby);
my $admin = session($standby);

# Until the standby has replayed all that the primary has written so far,
# committed or not.
sub replay
{
	my $lsn = session($primary)->value(
		q{SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'test', '')});
	wait_until(sub { $admin->value("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't' },
		'the standby to catch up');
	return;
}

#
# A key in each state.  Those in the second list have to be written to be claimed.
#
my %answered = (
	completed => q{SELECT idem_claim('completed', '{"n": 1}', operation => 'pay'),
		idem_complete('completed', '{"receipt": 1}', http_status => 201,
					  headers => '[["A", "b"]]', body => '\x00ff')},
	failed => q{SELECT idem_claim('failed', '{"n": 1}', operation => 'pay'),
		idem_fail('failed', '"declined"', http_status => 402)},
	unknown => q{SELECT idem_claim('unknown', '{"n": 1}', operation => 'pay'),
		idem_fail('unknown', disposition => 'unknown')},
	held => q{SELECT idem_claim('held', '{"n": 1}', operation => 'pay', lease => '1 ms', takeover => false)},
	processing => q{SELECT idem_claim('processing', '{"n": 1}', operation => 'pay', lease => '1 h')},
	retryable => q{SELECT idem_claim('retryable', '{"n": 1}', operation => 'pay'),
		idem_fail('retryable', disposition => 'retry', retry_after => '1 h')});
my %refused = (
	absent => 'SELECT 1',
	ended => q{SELECT idem_claim('ended', lease => '1 ms')},
	expired => q{SELECT idem_claim('expired', lease => '1 ms', ttl => '1 ms'),
		idem_complete('expired', '1', ttl => '1 ms')},
	repeatable => q{SELECT idem_claim('repeatable'), idem_fail('repeatable', disposition => 'retry')});
$p->value($_) foreach values %answered, values %refused;
wait_until(
	sub {
		$p->value(q{SELECT count(*) FROM idempotency_keys
					WHERE (key = 'held' OR key = 'ended') AND lease_until < clock_timestamp()
						OR key = 'expired' AND expires_at < clock_timestamp()}) eq '3';
	},
	'the short leases to end');
replay();

my %outcome = (map({ $_ => $_ } keys %answered), held => 'unknown');
my $result_of = 'SELECT outcome, http_status, headers, response, body, attempt FROM idem_claim';

# The same from a standby and from a read-only transaction of the primary.
sub check_read_only
{
	my ($session, $where, $hint) = @_;

	foreach my $key (sort keys %answered)
	{
		is($session->value("SELECT outcome FROM idem_claim('$key', '{\"n\": 1}', operation => 'pay')"),
			$outcome{$key}, "$where: $key is answered");
		is($session->value("SELECT outcome FROM idem_claim('$key', '{\"n\": 2}', operation => 'pay')"),
			'mismatch', "$where: $key, another request");
		is($session->value("SELECT outcome FROM idem_claim('$key', '{\"n\": 1}', operation => 'refund')"),
			'mismatch', "$where: $key, another operation");
	}
	is($session->value("$result_of('completed', operation => 'pay')"),
		'completed|201|[["A", "b"]]|{"receipt": 1}|\x00ff|1', "$where: a replay is complete");
	is($session->value("$result_of('failed', operation => 'pay')"), 'failed|402||"declined"||1',
		"$where: so is a failure's");
	is($session->value(q{SELECT retry_after > '0' AND retry_after <= '1 min' AND token IS NULL
						 FROM idem_claim('processing', operation => 'pay')}), 't',
		"$where: processing says when to ask again");
	is($session->value(q{SELECT retry_after > '50 min' FROM idem_claim('retryable', operation => 'pay')}), 't',
		"$where: retryable does, too");

	# The other calls that claim say the same; who waits for no longer than this
	# is told of a claim that is being processed.
	my $execute = sub {
		my ($key, $wait) = @_;
		return "SELECT outcome, response, replayed FROM idem_execute('$key', 'INSERT INTO nowhere VALUES (1)', "
		  . "'{\"n\": 1}', operation => 'pay', wait => $wait)";
	};
	my %response = (completed => '{"receipt": 1}', failed => '"declined"');
	foreach my $key (sort keys %answered)
	{
		my $replayed = exists $response{$key} ? 't' : 'f';
		is($session->value($execute->($key, "'0'")), join('|', $outcome{$key}, $response{$key} || '', $replayed),
			"$where: idem_execute of $key");
		is($session->value("SELECT outcome FROM idem_execute('$key', 'SELECT 1', '{\"n\": 2}', operation => 'pay')"),
			'mismatch', "$where: idem_execute of $key, another request");
		is($session->value("SELECT idem_once('$key')"), 'f', "$where: idem_once of $key, which is there");
	}
	my $keys = join(',', sort keys %answered);
	is($session->value("SELECT count(*) FROM idem_once_many('{$keys}')"), '0', "$where: idem_once_many of all of them");
	is($session->value("SELECT string_agg(outcome::text, ' ' ORDER BY key) FROM idem_claim_many('{$keys}', operation => 'pay')"),
		join(' ', map { $outcome{$_} } sort keys %answered), "$where: idem_claim_many of all of them");
	foreach my $key (sort keys %refused)
	{
		foreach my $call (
			"idem_execute('$key', 'SELECT 1')", "idem_once('$key')", "idem_once_many('{completed,$key}')",
			"idem_claim_many('{completed,$key}', operation => '')")
		{
			# Whatever is there is a message that was seen, unless it has expired.
			next if $call =~ /once/ && $key ne 'absent' && $key ne 'expired';
			my $result = is_sqlstate($session, "SELECT FROM $call", '25006', "$where: $call");
			like_hint($result, $hint, "$where: $call, the hint");
		}
	}

	foreach my $key (sort keys %refused)
	{
		my $result = is_sqlstate($session, "SELECT idem_claim('$key')", '25006', "$where: $key can't be claimed");
		like_hint($result, $hint, "$where: $key, the hint says what to do");
	}
	my $token = $p->value(q{SELECT token FROM idempotency_keys WHERE key = 'processing'});
	foreach my $call (
		"idem_complete('processing', '1', $token)", "idem_fail('processing', '1', $token)",
		"idem_renew('processing', $token)", "idem_checkpoint('processing', $token, 'c')",
		"idem_resolve('unknown', 'failed')", "idem_forget('completed')",
		"idem_complete_many('{processing}', '{$token}')")
	{
		my $result = is_sqlstate($session, "SELECT $call", '25006', "$where: $call");
		like_hint($result, $hint, "$where: $call, the hint");
	}

	is_sqlstate($session, q{SELECT idem_claim(NULL)}, 'IK400', "$where: bad input is still bad input");
	is($session->value(q{SELECT idem_key('a', 'b:c'), idem_uuid('k'), encode(idem_fingerprint('{"a": 1.0}'), 'hex')}),
		$p->value(q{SELECT idem_key('a', 'b:c'), idem_uuid('k'), encode(idem_fingerprint('{"a": 1}'), 'hex')}),
		"$where: names and fingerprints");
	foreach my $key (sort keys %answered, sort keys %refused)
	{
		my $get = "SELECT g.*::text FROM idem_get('$key') g";
		is($session->value($get), $p->value($get), "$where: idem_get of $key");
	}
	return;
}

# Each call in a transaction of its own.
check_read_only($s, 'standby', qr/primary/);
check_read_only(session($primary, options => { default_transaction_read_only => 'on' }),
	'read-only by default', qr/READ WRITE/);

$s->value('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
is($s->value("$result_of('completed', operation => 'pay')"),
	'completed|201|[["A", "b"]]|{"receipt": 1}|\x00ff|1', 'standby: a replay under REPEATABLE READ');
$s->value('ROLLBACK');

#
# A read-only transaction of the primary: answers cost nothing, and one can
# still write in the next.
#
my $r = session($primary, options => { default_transaction_read_only => 'on' });
$r->value(q{BEGIN READ WRITE; SELECT idem_claim('written'), idem_complete('written', '1'); COMMIT});
is($r->value(q{SELECT outcome FROM idem_claim('written')}), 'completed', 'READ WRITE lifts the default');
$r->value('BEGIN');
is($r->value(q{SELECT outcome FROM idem_claim('written')}), 'completed', 'a replay in a read-only transaction');
is($r->value('SELECT pg_current_xact_id_if_assigned() IS NULL'), 't', 'has no transaction id');
is_sqlstate($r, q{SELECT idem_claim('absent')}, '25006', 'a claim in it is refused');
$r->value('ROLLBACK');
is($p->value(q{SELECT count(*) FROM idempotency_keys WHERE key = 'absent'}), '0', 'and has changed nothing');
$p->value(q{BEGIN; SELECT idem_claim('turned'); SET TRANSACTION READ ONLY});
is_sqlstate($p, q{SELECT idem_complete('turned')}, '25006', 'a transaction that was made read-only is');
$p->value('ROLLBACK');

#
# A claim that the primary has not committed is seen as soon as its WAL has
# been replayed, as on the primary; idem_get shows what is committed.
#
$p->value(q{BEGIN; SELECT idem_claim('rival', '{"n": 1}')});
replay();
is($s->value(q{SELECT outcome, attempt FROM idem_claim('rival')}), 'processing|1',
	'standby: an uncommitted claim is processing');
is($s->value(q{SELECT outcome FROM idem_claim('rival', '{"n": 2}')}), 'mismatch',
	'standby: an uncommitted claim for another request is a mismatch');
is($s->value(q{SELECT count(*) FROM idem_get('rival')}), '0', 'standby: idem_get does not show it');
$p->value(q{SELECT idem_complete('rival', '1')});
replay();
is($s->value(q{SELECT outcome FROM idem_claim('rival')}), 'processing',
	'standby: an uncommitted completion is not shown as one');
$p->value('COMMIT');
replay();
is($s->value(q{SELECT outcome FROM idem_claim('rival')}), 'completed', 'standby: once committed, it is');

$p->value(q{BEGIN; SELECT idem_claim('withdrawn')});
replay();
is($s->value(q{SELECT outcome FROM idem_claim('withdrawn')}), 'processing', 'standby: another uncommitted claim');
$p->value('ROLLBACK');
replay();
is_sqlstate($s, q{SELECT idem_claim('withdrawn')}, '25006', 'standby: rolled back, the key is free, and not ours to claim');

$p->value(q{BEGIN; SELECT idem_forget('rival')});
replay();
is($s->value(q{SELECT outcome FROM idem_claim('rival')}), 'completed', 'standby: an uncommitted deletion changes nothing');
$p->value('ROLLBACK');

#
# A standby doesn't wait: a statement that lasts holds up the replay it waits
# for, and is cancelled with 40001 when max_standby_streaming_delay is over.
#
$p->value(q{SELECT idem_claim('waited', lease => '1 h')});
$p->value(q{BEGIN; SELECT idem_claim('waited.rival')});
replay();
foreach my $key ('waited', 'waited.rival')
{
	foreach my $begin ('', 'BEGIN; ')
	{
		is($s->value("${begin}SELECT outcome, retry_after > '0' FROM idem_claim('$key', wait => '10 min')"),
			'processing|t', "standby: wait => '10 min' of $key is answered at once: $begin");
		$s->value('ROLLBACK') if $begin;
	}
}
foreach my $wait ('NULL', q{'10 min'})
{
	is($s->value("SELECT outcome, replayed FROM idem_execute('$_', 'SELECT 1', wait => $wait)"), 'processing|f',
		"standby: idem_execute of $_ with wait => $wait is answered at once")
	  foreach 'waited', 'waited.rival';
}
# Of a message that is not committed nobody can say yet whether it was seen.
is($s->value(q{SELECT idem_once('waited')}), 'f', 'standby: idem_once of a claim that is committed');
foreach my $call (q{idem_once('waited.rival')}, q{idem_once_many('{waited,waited.rival}')})
{
	my $result = is_sqlstate($s, "SELECT FROM $call", '25006', "standby: $call, which is not committed");
	like_hint($result, qr/primary/, "standby: $call, the hint");
}
is($s->value(q{SELECT string_agg(outcome::text, ' ') FROM idem_claim_many('{waited.rival,waited}')}),
	'processing processing', 'standby: idem_claim_many of both');
$p->value(q{SELECT idem_complete('waited.rival', '2')});
$p->value('COMMIT');
replay();
is($s->value(q{SELECT idem_once('waited.rival')}), 'f', 'standby: once committed, the message was seen');
is($s->value(q{SELECT outcome, response FROM idem_claim('waited.rival', wait => '10 min')}), 'completed|2',
	'standby: asked again, it has the result');
is($admin->value(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database <> 0}), '0',
	'standby: nobody holds a key lock');

#
# While replay catches up, a row may move to another page many times during one
# look, each time behind the scan's back.  An old snapshot on the primary keeps
# the row from staying where it is.
#
$p->value(q{CREATE FUNCTION missed() RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		seen text;
		missed bigint := 0;
	BEGIN
		LOOP
			SELECT checkpoint INTO seen FROM idem_get('moving');
			missed := missed + (NOT FOUND)::int;
			EXIT WHEN seen = 'last';
			BEGIN
				PERFORM idem_claim('moving');
			EXCEPTION WHEN read_only_sql_transaction THEN
				missed := missed + 1;
			END;
		END LOOP;
		RETURN missed;
	END $$});
my $moving = $p->value(q{SELECT token FROM idem_claim('moving', lease => '1 h')});
my $old = session($primary);
$old->value('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
replay();
$admin->value('SELECT pg_wal_replay_pause()');
$p->value(qq{DO \$\$ DECLARE
		large jsonb := (SELECT to_jsonb(string_agg(md5(n::text), '')) FROM generate_series(1, 55) n);
	BEGIN FOR i IN 1 .. 4000 LOOP
		PERFORM idem_checkpoint('moving', $moving, 'one', large);
		COMMIT;
	END LOOP; END \$\$});
$p->value("SELECT idem_checkpoint('moving', $moving, 'last')");
$old->close;
my @readers = map { session($standby) } 1 .. 4;
$_->send('SELECT missed()') foreach @readers;
$admin->value('SELECT pg_sleep(0.1), pg_wal_replay_resume()');
is(join(' ', map { ($_->result->{rows}[0] || ['error'])->[0] } @readers), '0 0 0 0', 'standby: a row that moves is never missed');

#
# Promotion.
#
my $highest = $p->value('SELECT max(token) FROM idempotency_keys');
my $in_flight = $p->value(q{SELECT token FROM idem_claim('in flight', '{"n": 1}', lease => '1 h')});
$p->value(q{SELECT idem_claim('forgotten'), idem_forget('forgotten')}) foreach 1 .. 40;
my $forgotten = $p->value(q{SELECT token FROM idem_claim('forgotten')});
$p->value(q{BEGIN; SELECT idem_claim('open')});
replay();
$primary->stop('immediate');
$standby->promote;

is($s->value(q{SELECT outcome, response FROM idem_claim('completed', operation => 'pay')}),
	'completed|{"receipt": 1}', 'promoted: the old session gets the old results');
is($s->value(q{SELECT outcome FROM idem_claim('in flight')}), 'processing', 'promoted: an owner still has its key');
is($s->value("SELECT idem_complete('in flight', '1', $in_flight)"), 't', 'promoted: and can complete it');
is($s->value(q{SELECT outcome, attempt FROM idem_claim('open')}), 'claimed|1',
	'promoted: a claim that was never committed is gone');
is($s->value(q{SELECT outcome, attempt FROM idem_claim('ended')}), 'claimed|2', 'promoted: an ended lease is taken over');
is($s->value(q{SELECT outcome, attempt FROM idem_claim('expired')}), 'claimed|1', 'promoted: an expired key is free');
is($s->value(q{SELECT outcome, attempt FROM idem_claim('repeatable')}), 'claimed|2', 'promoted: a retry goes on');
$s->value(q{SELECT idem_forget('forgotten')});
cmp_ok($s->value(q{SELECT token FROM idem_claim('forgotten')}), '>', $forgotten,
	'promoted: tokens rise, for a deleted key too');
cmp_ok($s->value(q{SELECT min(token) FROM idempotency_keys WHERE key IN ('open', 'ended', 'expired', 'repeatable')}),
	'>', $highest, 'promoted: each new token is above all old ones');
is($s->value(q{SELECT idem_resolve('unknown', 'completed', '1')}), 't', 'promoted: an unknown outcome is resolved');
is($s->value(q{SELECT idem_once('message'), idem_once('message')}), 't|f', 'promoted: messages are taken');
is($s->value(q{SELECT outcome, replayed FROM idem_execute('command', 'SELECT 1')}), 'completed|f', 'promoted: commands run');

no_faults($_) foreach $primary, $standby;
$standby->stop;
done_testing();
