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

/* A row, by its entry in the index on due_at. */
typedef struct IdemEntry
{
	TimestampTz due_at;
	ItemPointerData place;		/* among the entries of that due_at */
	bool		valid;			/* is there one? */
} IdemEntry;

/*
 * A sweep over several batches; zeroed where it begins, but for what the
 * caller says of itself.
 */
typedef struct IdemSweep
{
	IdemEntry	position;		/* the last one that was passed */
	IdemEntry	deadly;			/* one in whose deletion a process has ended */
	IdemEntry  *trying;			/* where to write down which one that would be, or NULL */
	bool		own_transaction;	/* each batch is all that its transaction does */
	IdemTicks	until;			/* when a batch ends, full or not; 0: never */
	bool		more;			/* the last batch did all it may, or had no more time */
	bool		locked_out;		/* somebody has the table locked */
	bool		rows_locked;	/* the last batch ended at locks its rows would wait for */
	int64		deleted;		/* in all batches */
	int64		failed;			/* rows whose deletion raised an error */
	int64		failed_counted; /* of these, in the statistics */
	char		error[IDEM_ERROR_SIZE]; /* the last one */
} IdemSweep;

extern int	idem_compare_entries(const IdemEntry *a, const IdemEntry *b);
extern int64 idem_sweep_batch(IdemSweep *sweep, int batch_size);
extern int64 idem_sweep_estimate(int64 limit, IdemTicks until);
extern char *idem_sweep_progress(const IdemSweep *sweep, int64 estimate);

#endif							/* IDEM_SWEEP_H */
