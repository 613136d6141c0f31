/*-------------------------------------------------------------------------
 *
 * wait.h
 *	  Waiting until a key may have changed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "portability/instr_time.h"

typedef struct IdemWait
{
	instr_time	start;
	int64		duration;		/* microseconds, or IDEM_FOREVER */
	int64		pause;			/* microseconds, the next one if nobody wakes us */
} IdemWait;

/* What stands in the way. */
typedef struct IdemObstacle
{
	uint64		key;			/* hash */
	TransactionId xid;			/* a transaction that has changed the key */
	bool		brief;			/* it goes soon, and nobody tells */
	TimestampTz lease_until;	/* it goes then, without anybody's doing */
} IdemObstacle;

extern void idem_wait_begin(IdemWait *wait, int64 duration);
extern bool idem_wait_is_over(const IdemWait *wait, bool briefly);
extern void idem_wait_pause(IdemWait *wait, const IdemObstacle *obstacle);
extern void idem_wait_end(void);

#endif							/* IDEM_WAIT_H */
