# A clock that is set back, or forward, while keys are claimed: what depends on
# the clock follows it, and nothing else is harmed.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use IdemTest::Worker;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $clock = make_clock() or plan skip_all => 'there is no C compiler to make the clock with';
my $folder = PostgreSQL::Test::Utils::tempdir();

# set_clock SECONDS: that much ahead of the machine's.
sub set_clock
{
	my ($seconds) = @_;
	open(my $clock, '+<', "$folder/clock") or die "could not open the clock: $!";
	binmode($clock);
	syswrite($clock, pack('q', $seconds * 1_000_000));
	close($clock);
	return;
}

append_to_file("$folder/clock", pack('q', 0));
my $node = new_node('clock', start => 0);
{
	local $ENV{LD_PRELOAD} = $clock;
	local $ENV{IDEM_TEST_CLOCK} = "$folder/clock";
	$node->start;
}
my ($owner, $rival, $admin) = map { session($node) } 1 .. 3;
$admin->value('CREATE EXTENSION idempotency');

my $hour = 3600;
my $now = $admin->value('SELECT clock_timestamp()');
set_clock(-$hour);
is($admin->value("SELECT '$now' - clock_timestamp() > interval '59 min'"), 't', 'the clock can be set back');
set_clock($hour);
is($admin->value("SELECT clock_timestamp() - '$now' > interval '59 min'"), 't', 'and forward');
set_clock(0);

#
# Back by an hour between claim and completion.
#
my $token = $owner->value(q{SELECT token FROM idem_claim('back', '{"n": 1}', lease => '5 min')});
my $lease_until = $owner->value(q{SELECT lease_until FROM idem_get('back')});
set_clock(-$hour);
is($rival->value(q{SELECT outcome, attempt FROM idem_claim('back', '{"n": 1}')}), 'processing|1',
	'set back: a live owner is not replaced');
is($rival->value(q{SELECT retry_after > '0' AND retry_after <= '1 min' FROM idem_claim('back', '{"n": 1}')}), 't',
	'set back: a rival is told to ask again within bounds');
is($rival->value(q{SELECT outcome FROM idem_claim('back', '{"n": 2}')}), 'mismatch', 'set back: a mismatch is one');
is($rival->value(q{SELECT status, expired FROM idem_get('back')}), 'processing|f', 'set back: so does idem_get say');
is($owner->value("SELECT idem_renew('back', $token) >= '$lease_until'"), 't',
	'set back: a renewal does not shorten the lease by itself');
is($owner->value("SELECT idem_checkpoint('back', $token, 'c') >= '$lease_until'"), 't', 'set back: nor does a checkpoint');
is($owner->value("SELECT idem_complete('back', '\"done\"', $token)"), 't', 'set back: the owner can complete');
is($rival->value(q{SELECT outcome, response, attempt FROM idem_claim('back', '{"n": 1}')}), 'completed|"done"|1',
	'set back: and is replayed');
is($owner->value("SELECT idem_complete('back', '\"done\"', $token)"), 'f', 'set back: completing again is known as such');
set_clock(0);
is($rival->value(q{SELECT outcome FROM idem_claim('back', '{"n": 1}')}), 'completed', 'right again: still replayed');

# Back, with an owner in its transaction.
$owner->value(q{BEGIN; SELECT idem_claim('in transaction')});
set_clock(-$hour);
is($rival->value(q{SELECT outcome FROM idem_claim('in transaction')}), 'processing', 'set back: an open transaction holds its key');
$owner->value(q{SELECT idem_complete('in transaction', '1'); COMMIT});
is($rival->value(q{SELECT outcome FROM idem_claim('in transaction')}), 'completed', 'set back: and completes it');
set_clock(0);

# A lease that has ended by the clock, and then has not.
$token = $owner->value(q{SELECT token FROM idem_claim('to and fro', lease => '5 min')});
set_clock($hour);
is($admin->value(q{SELECT lease_until < clock_timestamp() FROM idem_get('to and fro')}), 't', 'set forward: the lease has ended');
set_clock(0);
is($rival->value(q{SELECT outcome, attempt FROM idem_claim('to and fro')}), 'processing|1',
	'right again: nobody came by meanwhile, so it is the owner\'s still');
set_clock($hour);
is($rival->value(q{SELECT outcome, attempt FROM idem_claim('to and fro', lease => '5 min')}), 'claimed|2',
	'set forward: it is taken over');
set_clock(0);
is_sqlstate($owner, "SELECT idem_complete('to and fro', '1', $token)", 'IK410', 'right again: for good');
is($owner->value(q{SELECT outcome, attempt FROM idem_claim('to and fro')}), 'processing|2', 'and there is one owner');

#
# Tokens: of one key, whatever the clock, and though the key is deleted.
#
my @tokens;
foreach my $seconds (0, -$hour, $hour, -2 * $hour, 0)
{
	set_clock($seconds);
	push @tokens, $owner->value(q{SELECT idem_forget('tokens'); SELECT token FROM idem_claim('tokens')});
}
is("@tokens", join(' ', sort { $a <=> $b } @tokens), 'tokens rise, however the clock is set');
set_clock(0);

#
# Settled rows.
#
$owner->value(q{SELECT idem_claim('kept'), idem_complete('kept', '1', ttl => '30 min')});
$owner->value(q{SELECT idem_claim('retry'), idem_fail('retry', disposition => 'retry', retry_after => '10 min')});
$owner->value(q{SELECT idem_claim('held', lease => '5 min', takeover => false)});
$owner->value(q{SELECT idem_claim('unknown'), idem_fail('unknown', disposition => 'unknown')});
set_clock(-$hour);
is($rival->value(q{SELECT outcome FROM idem_claim('kept')}), 'completed', 'set back: a result is replayed');
is($rival->value(q{SELECT outcome, retry_after > '1 h' FROM idem_claim('retry')}), 'retryable|t',
	'set back: a retry has to wait for its instant');
is($rival->value(q{SELECT outcome FROM idem_claim('held')}), 'processing', 'set back: a claim to be held');
is($rival->value(q{SELECT outcome FROM idem_claim('unknown')}), 'unknown', 'set back: an unknown outcome');
set_clock($hour);
is($rival->value(q{SELECT outcome, attempt FROM idem_claim('kept')}), 'claimed|1', 'set forward: a result expires');
is($rival->value(q{SELECT outcome, attempt FROM idem_claim('retry')}), 'claimed|2', 'set forward: a retry goes on');
is($rival->value(q{SELECT outcome FROM idem_claim('held')}), 'unknown', 'set forward: a claim is held');
is($rival->value(q{SELECT outcome FROM idem_claim('unknown')}), 'unknown', 'set forward: an unknown outcome stays one');
set_clock(0);

#
# A wait lasts as long as it was asked for, by the hands of the caller's watch.
#
$owner->value(q{SELECT idem_claim('waited', lease => '1 day')});
my $started = time();
$rival->send(q{SELECT outcome FROM idem_claim('waited', wait => '1 s')});
wait_for_sleep($admin, $rival);
set_clock(-$hour);
my $deadline = time() + 10;
wait_until(sub { $rival->is_done || time() > $deadline }, 'ten seconds');
ok($rival->is_done, 'set back while one waits: the wait is no longer for it');
$admin->value('SELECT pg_cancel_backend(' . $rival->pid . ')') unless $rival->is_done;
my $result = $rival->result;
is($result->{error} ? $result->{error}{C} : $rival->text($result), 'processing', 'and is answered as ever');
note(sprintf '%.1f s', time() - $started);

set_clock(0);
$token = $owner->value(q{SELECT token FROM idem_claim('waited for', lease => '1 day')});
$rival->send(q{SELECT outcome, response FROM idem_claim('waited for', wait => '10 min')});
wait_for_sleep($admin, $rival);
set_clock(-$hour);
$owner->value("SELECT idem_complete('waited for', '2', $token)");
is($rival->fetch, 'completed|2', 'a waiter gets its result, set back or not');

#
# The worker comes again by a clock that nobody sets.
#
set_clock($hour);
set($admin, 'idempotency.worker' => 'on', 'idempotency.naptime' => 1);
make_expired($admin, 1);
swept($admin, 'set forward');
set_clock(-$hour);
$admin->value('DELETE FROM idempotency_keys');
foreach my $round (1 .. 3)
{
	make_expired($admin, 1);
	swept($admin, "set back by two hours, round $round");
}
is($admin->value(q{SELECT last_sweep_at < clock_timestamp() + interval '1 min' FROM idempotency_stats}), 't', 'set back: the last sweep is the last one');

# A sweep that ended while the clock was ahead doesn't hide that none has since.
set($admin, 'idempotency.worker' => 'off');
$admin->value(q{SET idempotency.health_sweep_overdue = '30 min'});
my $overdue = q{SELECT level FROM idem_health() WHERE item = 'sweep_overdue'};
set_clock(2 * $hour);
make_expired($admin, 1);
$admin->value('CALL idem_sweep_all()');
set_clock(0);
make_expired($admin, 1);
set_clock($hour);
is($admin->value($overdue), 'warning', 'set back: what nobody has swept for an hour is overdue');
set_clock(0);
$admin->value('CALL idem_sweep_all()');
make_expired($admin, 1);
set_clock(2 * $hour + 600);
is($admin->value($overdue), 'warning', 'set back: a later sweep is the last one');

# A batch that ends while somebody looks is progress, and not of a clock that is ahead.
set_clock(0);
make_expired($admin, 20000);
set_clock(2 * $hour + 600);
$owner->send(q{CALL idem_sweep_all(50, pause => '2 ms')});
wait_until(sub { $admin->value('SELECT count(*) < 20000 FROM idempotency_keys') eq 't' }, 'the first batch');
my %levels = map { $admin->value($overdue) => 1 } 1 .. 30;
is(join(' ', keys %levels), 'ok', 'a sweep that gets on is not overdue');
$owner->result;
set_clock(0);

no_faults($node);
$node->stop;
done_testing();
