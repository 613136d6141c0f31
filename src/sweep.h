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

#include "stats.h"
#include "ticks.h"

/* A larger number of rows is only called so. */
#define IDEM_ESTIMATE_UP_TO INT64CONST(1000000)

/*
 * A sweep over several batches; zeroed where it begins, but for what the
 * caller says of itself.
 */
typedef struct IdemSweep
{
	TimestampTz position;		/* due_at of the last row that was tried */
	ItemPointerData entry;		/* its place among the entries of that due_at */
	bool		positioned;		/* are there such rows yet? */
	bool		own_transaction;	/* each batch is all that its transaction does */
	IdemTicks	until;			/* when a batch ends, full or not; 0: never */
	bool		more;			/* the last batch did all it may, or had no more time */
	bool		locked_out;		/* somebody has the table locked */
	int64		deleted;		/* in all batches */
	int64		failed;			/* rows whose deletion raised an error */
	char		error[IDEM_ERROR_SIZE]; /* the last one */
} IdemSweep;

extern int64 idem_sweep_batch(IdemSweep *sweep, int batch_size);
extern int64 idem_sweep_estimate(int64 limit, IdemTicks until);
extern char *idem_sweep_progress(const IdemSweep *sweep, int64 estimate);

#endif							/* IDEM_SWEEP_H */
