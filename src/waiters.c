/*-------------------------------------------------------------------------
 *
 * waiters.c
 *	  Sleeping until a key may have changed, and waking who does.
 *
 * A fixed array of condition variables in shared memory, indexed by the hash
 * of the key.  Whoever has changed a key wakes its slot after his transaction
 * has ended (xact.c), when the change is there for everybody to see.  A waiter
 * enters the slot, looks at the key, and only then sleeps, so no change can
 * fall between the look and the sleep.  Two keys in one slot cost each other a
 * look.
 *
 * A slot also counts the writes to its keys.  Who has looked, and finds the
 * count unchanged once he has the key lock, need not look again.
 *
 * There is shared memory only if the library was preloaded.  Without it nobody
 * is woken, and a waiter looks again after a while.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"

#include "shared.h"
#include "ticks.h"
#include "waiters.h"

typedef struct Slot
{
	ConditionVariable changed;
	pg_atomic_uint64 writes;	/* counted under the key lock, from 1 */
} Slot;

static Slot *slots = NULL;

static void
set_up(void *part)
{
	Slot	   *slot = part;

	for (int i = 0; i < IDEM_WAIT_SLOTS; i++)
	{
		ConditionVariableInit(&slot[i].changed);
		pg_atomic_init_u64(&slot[i].writes, 1);
	}
}

void
idem_waiters_init(void)
{
	idem_shared_add("idempotency waiters", IDEM_WAIT_SLOTS * sizeof(Slot), set_up,
					(void **) &slots);
}

bool
idem_waiters_are_woken(void)
{
	return slots != NULL;
}

int
idem_waiters_slot(uint64 hash)
{
	return (int) (hash % IDEM_WAIT_SLOTS);
}

/*
 * Sleeps at most timeout milliseconds.  The first call for a key enters its
 * slot and returns at once, for the caller to look again; so does any call
 * after something else (a read from disk) used a condition variable.
 */
void
idem_waiters_sleep(uint64 hash, long timeout, uint32 wait_event)
{
	if (slots != NULL)
		(void) ConditionVariableTimedSleep(&slots[idem_waiters_slot(hash)].changed, timeout,
										   wait_event);
	else
		idem_sleep_once(timeout, wait_event);
}

/* To be called at the end of a wait that no error has ended. */
void
idem_waiters_leave(void)
{
	ConditionVariableCancelSleep();
}

void
idem_waiters_wake(int slot)
{
	ConditionVariableBroadcast(&slots[slot].changed);
}

/* How often the keys of the slot were written; 0 if nobody counts. */
uint64
idem_writes_to_slot(uint64 hash)
{
	return slots != NULL ? pg_atomic_read_u64(&slots[idem_waiters_slot(hash)].writes) : 0;
}

void
idem_count_write(int slot)
{
	pg_atomic_fetch_add_u64(&slots[slot].writes, 1);
}
