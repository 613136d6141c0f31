/*-------------------------------------------------------------------------
 *
 * sweep_row.h
 *	  Deleting one row of a sweep.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SWEEP_ROW_H
#define IDEM_SWEEP_ROW_H

#include "store.h"
#include "sweep.h"

/* What a batch keeps of code that isn't ours. */
typedef struct IdemForeignCode
{
	MemoryContext context;		/* for a row at a time; current for the store, too */
	int			timeouts;		/* of locks that it asked for */
} IdemForeignCode;

extern void idem_sweep_row_failed(IdemSweep *sweep, const char *why);
extern bool idem_sweep_row(IdemStore *store, TupleTableSlot *slot);
extern bool idem_sweep_row_carefully(IdemStore *store, TupleTableSlot *slot, Relation index,
									 IdemSweep *sweep, IdemForeignCode *code);

#endif							/* IDEM_SWEEP_ROW_H */
