/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  idem_renew and idem_checkpoint: what an owner does while at it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/timestamp.h"

#include "change.h"
#include "state.h"
#include "xact.h"

/* A call that works on an open claim, and always needs its token. */
static void
find_open_claim(IdemChange *s)
{
	(void) idem_find_row(s);
	if (s->token.isnull)
		idem_token_required(&s->store.name);
	if (s->status != IDEM_PROCESSING)
		idem_already_settled(s);
}

/* The row lives as long as its lease at least. */
static void
set_lease(IdemChange *s, TimestampTz lease_until)
{
	const IdemVersion *row = &s->store.current;
	TimestampTz expires_at = idem_later(idem_instant(row, IDEM_COL_CLAIMED_AT),
										idem_stored_ttl(row));

	idem_set_column(s, IDEM_COL_LEASE_UNTIL, TimestampTzGetDatum(lease_until));
	if (DatumGetBool(idem_value(row, IDEM_COL_TAKEOVER)))
		idem_set_expiry(s, Max(expires_at, lease_until));
}

static Datum
finish_change(IdemChange *s)
{
	Datum		lease_until = s->values[IDEM_COL_LEASE_UNTIL - 1];

	if (!s->own_claim)
		idem_xact_changed();
	return idem_finish_change(s, lease_until);
}

/*
 * idem_renew(key text, token bigint, lease interval, scope text) -> timestamptz
 *
 * Sets the end of the lease to lease from now, and returns it.  Without lease
 * it is idempotency.default_lease from now, but never earlier than it was.
 *
 * Errors: IK400, IK404, IK409 once settled, IK410, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_renew);
Datum
idem_renew(PG_FUNCTION_ARGS)
{
	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	int64		lease = idem_arg_lease(fcinfo, 2);
	bool		extend_only = PG_ARGISNULL(2);

	idem_begin_change_with_token(&s, "idem_renew()", name, fcinfo->args[1]);
	do
	{
		TimestampTz lease_until;

		find_open_claim(&s);
		lease_until = idem_later(s.now, lease);
		if (extend_only)
			lease_until = Max(lease_until, idem_instant(&s.store.current, IDEM_COL_LEASE_UNTIL));
		set_lease(&s, lease_until);
	} while (!idem_write_row(&s));
	PG_RETURN_DATUM(finish_change(&s));
}

/*
 * idem_checkpoint(key text, token bigint, checkpoint text, state jsonb,
 *				   scope text, lease interval) -> timestamptz
 *
 * Notes how far the work has got, for whoever takes over: replaces checkpoint
 * and state, and with lease renews too.  Returns the end of the lease.
 *
 * Errors: IK400, IK404, IK409 once settled, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_checkpoint);
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 4);
	NullableDatum checkpoint = fcinfo->args[2];
	NullableDatum state = fcinfo->args[3];
	int64		lease = idem_arg_duration(fcinfo, 5, "lease", false);

	if (checkpoint.isnull)
		idem_bad_null("checkpoint", "Name the step that has been reached.");
	idem_check_size(idem_datum_size(checkpoint) + idem_datum_size(state), "checkpoint");

	idem_begin_change_with_token(&s, "idem_checkpoint()", name, fcinfo->args[1]);
	do
	{
		find_open_claim(&s);
		idem_set_argument(&s, IDEM_COL_CHECKPOINT, checkpoint);
		idem_set_argument(&s, IDEM_COL_STATE, state);
		if (lease != 0)
			set_lease(&s, idem_later(s.now, lease));
	} while (!idem_write_row(&s));
	PG_RETURN_DATUM(finish_change(&s));
}
