/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Waiting until a key may have changed.
 *
 * A sleep on the latch that starts at a millisecond and doubles up to 32, and
 * ends early at the end of the lease.  Nothing is held meanwhile but what any
 * statement holds, so a waiter stands in nobody's way and leaves nothing behind
 * when it is cancelled.  How long it has waited is told by a clock that nobody
 * sets.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "wait.h"

#define FIRST_PAUSE		INT64CONST(1000)
#define LONGEST_PAUSE	INT64CONST(32000)

/* How long a claim looks again for a row that is just being deleted. */
#define BRIEFLY			INT64CONST(100000)

/*
 * A standby is no place to wait in: the statement's snapshot holds up the
 * replay that would bring what we wait for, and a recovery conflict ends it.
 */
void
idem_wait_begin(IdemWait *wait, int64 duration)
{
	INSTR_TIME_SET_CURRENT(wait->start);
	wait->duration = RecoveryInProgress() ? 0 : duration;
	wait->pause = FIRST_PAUSE;
}

static int64
elapsed(const IdemWait *wait)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	INSTR_TIME_SUBTRACT(now, wait->start);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/* May no more time be spent, or with briefly: not even the little there is? */
bool
idem_wait_is_over(const IdemWait *wait, bool briefly)
{
	int64		limit = briefly ? Max(wait->duration, BRIEFLY) : wait->duration;

	return limit == 0 || elapsed(wait) >= limit;
}

void
idem_wait_pause(IdemWait *wait, TimestampTz lease_until)
{
	static uint32 wait_event = 0;
	TimestampTz now = GetCurrentTimestamp();
	int64		pause = wait->pause;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencyKey");

	if (wait->duration > elapsed(wait))
		pause = Min(pause, wait->duration - elapsed(wait));
	if (lease_until > now)
		pause = Min(pause, lease_until - now);
	wait->pause = Min(wait->pause * 2, LONGEST_PAUSE);

	/* Rounded up, so that the instant waited for has come when we wake. */
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 (long) ((pause + 999) / 1000), wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}
