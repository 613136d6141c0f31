/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Waiting until a key may have changed.
 *
 * A sleep on the latch that starts at a millisecond and doubles up to 32, and
 * ends early at the end of the lease.  Nothing is held meanwhile, so a waiter
 * stands in nobody's way and leaves nothing behind when it is cancelled.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/timestamp.h"

#include "args.h"
#include "compat.h"
#include "wait.h"

#define FIRST_PAUSE		INT64CONST(1000)
#define LONGEST_PAUSE	INT64CONST(32000)

/* How long a claim looks again for a row that is just being deleted. */
#define BRIEFLY			INT64CONST(100000)

void
idem_wait_begin(IdemWait *wait, int64 duration)
{
	wait->start = GetCurrentTimestamp();
	wait->deadline = duration == IDEM_FOREVER ? DT_NOEND : idem_later(wait->start, duration);
	wait->pause = FIRST_PAUSE;
}

/* May no more time be spent, or with briefly: not even the little there is? */
bool
idem_wait_is_over(const IdemWait *wait, bool briefly)
{
	TimestampTz end = wait->deadline;

	if (briefly)
		end = Max(end, wait->start + BRIEFLY);
	return end <= wait->start || end <= GetCurrentTimestamp();
}

void
idem_wait_pause(IdemWait *wait, TimestampTz lease_until)
{
	static uint32 wait_event = 0;
	TimestampTz now = GetCurrentTimestamp();
	int64		pause = wait->pause;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencyKey");

	if (wait->deadline > now)
		pause = Min(pause, wait->deadline - now);
	if (lease_until > now)
		pause = Min(pause, lease_until - now);
	wait->pause = Min(wait->pause * 2, LONGEST_PAUSE);

	/* Rounded up, so that the instant waited for has come when we wake. */
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 (long) ((pause + 999) / 1000), wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}
