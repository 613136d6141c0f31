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
	int64		duration;		/* all these in microseconds */
	int64		pause;			/* the next one */
} IdemWait;

extern void idem_wait_begin(IdemWait *wait, int64 duration);
extern bool idem_wait_is_over(const IdemWait *wait, bool briefly);
extern void idem_wait_pause(IdemWait *wait, TimestampTz lease_until);

#endif							/* IDEM_WAIT_H */
