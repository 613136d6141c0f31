/*-------------------------------------------------------------------------
 *
 * batch.h
 *	  The keys of a call that has many.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_BATCH_H
#define IDEM_BATCH_H

#include "idempotency.h"

#include "fmgr.h"
#include "utils/palloc.h"
#include "utils/tuplestore.h"

typedef struct IdemBatch
{
	text	   *scope;
	int			nkeys;
	text	  **keys;			/* as the caller has them */
	int		   *order;			/* indexes into keys, in which to go through them */
	MemoryContext per_key;		/* for the current key */
} IdemBatch;

/* The elements of an array that goes with the keys, or no array. */
typedef struct IdemElements
{
	Datum	   *values;
	bool	   *nulls;
} IdemElements;

extern void idem_arg_batch(FunctionCallInfo fcinfo, int keys_arg, int scope_arg,
						   IdemBatch *batch);
extern IdemElements idem_arg_elements(FunctionCallInfo fcinfo, int arg, const IdemBatch *batch,
									  const char *what);
extern NullableDatum idem_element(const IdemElements *elements, int i);
extern Tuplestorestate *idem_begin_set(FunctionCallInfo fcinfo, TupleDesc *desc);

#endif							/* IDEM_BATCH_H */
