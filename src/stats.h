/*-------------------------------------------------------------------------
 *
 * stats.h
 *	  Counters of what the extension does in each database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STATS_H
#define IDEM_STATS_H

#include "postgres.h"

#include "datatype/timestamp.h"

typedef enum IdemCounter
{
	IDEM_COUNT_CLAIMS,
	IDEM_COUNT_TAKEOVERS,
	IDEM_COUNT_REPLAYS,
	IDEM_COUNT_PROCESSING,
	IDEM_COUNT_MISMATCHES,
	IDEM_COUNT_COMPLETIONS,
	IDEM_COUNT_FAILURES,
	IDEM_COUNT_LOST,
	IDEM_COUNT_ONCE_FIRST,
	IDEM_COUNT_ONCE_AGAIN,
	IDEM_COUNT_SWEPT_ROWS,
	IDEM_COUNT_SWEEP_RUNS,
	IDEM_COUNT_SWEEP_ERRORS,
	IDEM_COUNT_REUSED,			/* soon after their expiry */
	IDEM_NCOUNTERS
} IdemCounter;

#define IDEM_ERROR_SIZE 256

/* One run of a sweep, however many batches it has had. */
typedef struct IdemSweepRun
{
	int64		rows;			/* deleted */
	int64		failed;			/* rows whose deletion raised an error */
	TimestampTz start;
	TimestampTz end;
	char		error[IDEM_ERROR_SIZE];		/* the last one, or empty */
} IdemSweepRun;

/* What is known of a database. */
typedef struct IdemStats
{
	uint64		counts[IDEM_NCOUNTERS];
	IdemSweepRun last_sweep;	/* end is 0 if there was none */
	char		last_error[IDEM_ERROR_SIZE];	/* of any sweep */
	int64		sweeping;		/* microseconds, in all runs */
	TimestampTz last_batch;		/* of a run that may not have ended; 0: none */
	TimestampTz reset_at;
} IdemStats;

extern void idem_copy_error(char *to, const char *error);
extern void idem_stats_init(void);
extern void idem_stats_prepare(void);
extern void idem_count(IdemCounter counter);
extern void idem_count_lost(void);
extern void idem_count_sweep(int64 rows, int64 failed, int64 errors, const char *error,
							 TimestampTz start, TimestampTz end);
extern void idem_stats_sweep_begin(TimestampTz start);
extern void idem_count_batch(int64 rows);
extern void idem_stats_sweep_run(int64 rows, int64 failed, int64 errors, const char *error,
								 TimestampTz start, TimestampTz end);
extern bool idem_stats_read(IdemStats *stats);
extern uint32 idem_stats_turn(uint32 bad, uint32 well, uint32 *memory);

#endif							/* IDEM_STATS_H */
