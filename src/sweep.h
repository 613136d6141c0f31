/*-------------------------------------------------------------------------
 *
 * sweep.h
 *	  Deleting expired rows, one batch at a time.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SWEEP_H
#define IDEM_SWEEP_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "storage/itemptr.h"

/*
 * A sweep over several batches; zeroed where it begins, but for what the
 * caller says of itself.
 */
typedef struct IdemSweep
{
	TimestampTz position;		/* where the next batch begins, by due_at */
	bool		positioned;
	bool		own_transaction;	/* each batch is all that its transaction does */
	bool		more;			/* the last batch was full */
	bool		locked_out;		/* somebody has the table locked */
	int64		deleted;		/* in all batches */
	int64		failed;			/* rows whose deletion raised an error */
	TimestampTz failed_at;		/* the last one's place in the index */
	ItemPointerData failed_tid;
	char		error[256];		/* the last one */
} IdemSweep;

extern int64 idem_sweep_batch(IdemSweep *sweep, int batch_size);
extern int64 idem_sweep_estimate(int64 limit);

#endif							/* IDEM_SWEEP_H */
