/*-------------------------------------------------------------------------
 *
 * change.c
 *	  Changing the row of a key that is there.
 *
 * All changes go one way: take the key lock, look, see that the row is there
 * and the caller's (idem_find_row), decide, write.  If the row changed under
 * the decision, from the start again.  A transaction that is changing the row
 * is waited for, without the key lock, as an UPDATE would.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "change.h"
#include "state.h"
#include "stats.h"
#include "xact.h"

char *
idem_changed_key(const IdemChange *s)
{
	return text_to_cstring(s->store.name.key);
}

static void
no_live_claim(const IdemChange *s)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_NO_CLAIM),
			 errmsg("no live claim for idempotency key \"%s\"", idem_changed_key(s)),
			 errdetail("The key was never claimed in this scope, or it has expired or been deleted."),
			 errhint("Claim the key first, with a ttl and a lease that outlast the work.")));
}

void
idem_already_settled(const IdemChange *s)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_SETTLED),
			 errmsg("idempotency key \"%s\" is already settled as \"%s\"", idem_changed_key(s),
					idem_status_name(s->status)),
			 errhint(s->status == IDEM_UNKNOWN
					 ? "Settle a key of unknown outcome with idem_resolve()."
					 : s->status == IDEM_RETRYABLE
					 ? "Claim the key again."
					 : "Read the stored result with idem_get(); it stays as it is.")));
}

void
idem_token_required(const IdemKey *name)
{
	idem_count_lost();
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_LOST),
			 errmsg("a token is required for idempotency key \"%s\"", text_to_cstring(name->key)),
			 errdetail("Only completion and failure do without, in the transaction that made the claim."),
			 errhint("Pass the token that idem_claim() returned.")));
}

static void
check_token(const IdemChange *s)
{
	if (s->token.isnull)
	{
		if (!idem_xact_is_own_claim(&s->store))
			idem_token_required(&s->store.name);
		return;
	}
	if (DatumGetInt64(s->token.value) !=
		DatumGetInt64(idem_value(&s->store.current, IDEM_COL_TOKEN)))
	{
		idem_count_lost();
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_LOST),
				 errmsg("the claim on idempotency key \"%s\" was lost", idem_changed_key(s)),
				 errdetail("Token " INT64_FORMAT " is not the current one.",
						   DatumGetInt64(s->token.value)),
				 errhint("The key was taken over, resolved or claimed anew; do nothing more in its name.")));
	}
}

void
idem_begin_change(IdemChange *s, const char *function, IdemKey name, IdemAccess access)
{
	memset(s, 0, sizeof(*s));
	s->access = access;
	idem_require_writable(function);
	idem_open(&s->store, &name, RowExclusiveLock);
}

void
idem_begin_change_with_token(IdemChange *s, const char *function, IdemKey name, NullableDatum token)
{
	idem_begin_change(s, function, name, IDEM_OWNERS_CLAIM);
	s->token = token;
}

/* Turns to another key, for the same kind of change. */
void
idem_next_change(IdemChange *s, const IdemKey *name, NullableDatum token)
{
	idem_select(&s->store, name);
	s->token = token;
}

/* Copies the row found; its varlenas stay in the pinned page. */
static void
load_row(IdemChange *s)
{
	int			natts = RelationGetDescr(s->store.rel)->natts;
	TupleTableSlot *slot = s->store.current.slot;

	if (s->values == NULL)
	{
		s->values = MemoryContextAlloc(s->store.context, natts * sizeof(Datum));
		s->nulls = MemoryContextAlloc(s->store.context, natts * sizeof(bool));
	}
	memcpy(s->values, slot->tts_values, natts * sizeof(Datum));
	memcpy(s->nulls, slot->tts_isnull, natts * sizeof(bool));
	s->status = idem_status(&s->store, &s->store.current);
	s->own_claim = s->status == IDEM_PROCESSING && idem_xact_is_own_claim(&s->store);
}

void
idem_set_expiry(IdemChange *s, TimestampTz expires_at)
{
	TimestampTz due_at = DatumGetTimestampTz(s->values[IDEM_COL_DUE_AT - 1]);

	idem_set_column(s, IDEM_COL_EXPIRES_AT, TimestampTzGetDatum(expires_at));
	idem_set_column(s, IDEM_COL_DUE_AT,
					TimestampTzGetDatum(idem_due_still(due_at, expires_at)));
}

static bool
may_be_changed(const IdemChange *s)
{
	const IdemVersion *row = &s->store.current;

	switch (s->access)
	{
		case IDEM_ANY_ROW:
			return true;
		case IDEM_OWN_CLAIM:
			return row->exists && row->own;
		default:
			return idem_is_live(row, s->now);
	}
}

/*
 * Finds the row, once nobody else is changing it; raises IK404 or IK410 where
 * the caller may not do this to it.  False if there is none and none needed.
 * Returns with the key lock held.
 */
bool
idem_find_row(IdemChange *s)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		idem_lock_key(&s->store);
		idem_look(&s->store);
		s->now = GetCurrentTimestamp();
		if (!may_be_changed(s))
			no_live_claim(s);
		if (!s->store.current.exists)
			return false;
		if (s->access == IDEM_OWNERS_CLAIM || s->access == IDEM_OWN_CLAIM)
			check_token(s);
		if (!TransactionIdIsValid(s->store.current.busy))
			break;
		idem_await_version(&s->store, &s->store.current);
	}
	load_row(s);
	return true;
}

/*
 * What became of a write; false if the row has to be found and decided on
 * again.  Another's row lock is waited for, without the key lock.
 */
bool
idem_is_written(IdemChange *s, TM_Result result, LockTupleMode mode)
{
	if (result == TM_Ok)
		return true;
	if (result == TM_BeingModified)
		idem_await_row_lock(&s->store, mode);
	else
		idem_unlock_key(&s->store);
	return false;
}

bool
idem_write_row(IdemChange *s)
{
	TM_Result	result = idem_update(&s->store, s->values, s->nulls, false);

	return idem_is_written(s, result, LockTupleNoKeyExclusive);
}

/* Nothing to write after all. */
Datum
idem_finish_change(IdemChange *s, Datum result)
{
	idem_close(&s->store);
	return result;
}
