/*-------------------------------------------------------------------------
 *
 * waiters.h
 *	  Sleeping until a key may have changed, and waking who does.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAITERS_H
#define IDEM_WAITERS_H

#include "postgres.h"

/* A power of two. */
#define IDEM_WAIT_SLOTS 1024

extern void idem_waiters_init(void);
extern bool idem_waiters_are_woken(void);
extern void idem_waiters_sleep(uint64 hash, long timeout, uint32 wait_event);
extern void idem_waiters_leave(void);
extern int	idem_waiters_slot(uint64 hash);
extern void idem_waiters_wake(int slot);
extern uint64 idem_writes_to_slot(uint64 hash);
extern void idem_count_write(int slot);

#endif							/* IDEM_WAITERS_H */
