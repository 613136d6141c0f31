/*-------------------------------------------------------------------------
 *
 * change.h
 *	  Changing the row of a key that is there.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CHANGE_H
#define IDEM_CHANGE_H

#include "args.h"
#include "store.h"

/* What a call may be applied to. */
typedef enum IdemAccess
{
	IDEM_OWNERS_CLAIM,			/* a live row whose token the caller has */
	IDEM_OWN_CLAIM,				/* one this transaction made, expired or not */
	IDEM_LIVE_ROW,
	IDEM_ANY_ROW				/* or none */
} IdemAccess;

typedef struct IdemChange
{
	IdemStore	store;
	IdemAccess	access;
	NullableDatum token;
	TimestampTz now;
	bool		own_claim;		/* open, and made in this transaction */
	IdemStatus	status;			/* of the row found */
	Datum	   *values;			/* the row found, to be changed */
	bool	   *nulls;
} IdemChange;

static inline void
idem_set_column(IdemChange *s, IdemColumn column, Datum value)
{
	s->values[column - 1] = value;
	s->nulls[column - 1] = false;
}

static inline void
idem_set_argument(IdemChange *s, IdemColumn column, NullableDatum argument)
{
	s->values[column - 1] = argument.value;
	s->nulls[column - 1] = argument.isnull;
}

static inline void
idem_set_null(IdemChange *s, IdemColumn column)
{
	s->nulls[column - 1] = true;
}


/* change.c */
extern void idem_begin_change(IdemChange *s, const char *function, IdemKey name,
							  IdemAccess access);
extern void idem_begin_change_with_token(IdemChange *s, const char *function, IdemKey name,
										 NullableDatum token);
extern void idem_next_change(IdemChange *s, const IdemKey *name, NullableDatum token);
extern void idem_set_expiry(IdemChange *s, TimestampTz expires_at);
extern bool idem_find_row(IdemChange *s);
extern bool idem_is_written(IdemChange *s, TM_Result result, LockTupleMode mode);
extern bool idem_write_row(IdemChange *s);
extern Datum idem_finish_change(IdemChange *s, Datum result);
extern char *idem_changed_key(const IdemChange *s);
extern void idem_already_settled(const IdemChange *s);
extern void idem_token_required(const IdemKey *name);

/* settle.c */
extern bool idem_settle(IdemChange *s, IdemStatus status, const IdemResult *result,
						int64 ttl, int64 retry_after);
extern void idem_set_result(IdemChange *s, IdemStatus status, const IdemResult *result);
extern void idem_set_retention(IdemChange *s, IdemStatus status, int64 ttl, TimestampTz retry_at);
extern bool idem_same_result(const IdemChange *s, const IdemResult *result);

#endif							/* IDEM_CHANGE_H */
