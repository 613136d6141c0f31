/*-------------------------------------------------------------------------
 *
 * state.c
 *	  What a version of a key's row says at a given instant.
 *
 * Time alone turns a live row into an expired one and a running lease into an
 * ended one, so both are asked here and stored nowhere.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "args.h"
#include "state.h"

/* The instant in a column; one that is null lies before all others. */
TimestampTz
idem_instant(const IdemVersion *version, IdemColumn column)
{
	if (idem_isnull(version, column))
		return DT_NOBEGIN;
	return DatumGetTimestampTz(idem_value(version, column));
}

/* Is the key there?  An expired row counts as absent. */
bool
idem_is_live(const IdemVersion *version, TimestampTz now)
{
	return version->exists && idem_instant(version, IDEM_COL_EXPIRES_AT) > now;
}

IdemStatus
idem_status(const IdemStore *store, const IdemVersion *version)
{
	return idem_status_of(store->table, DatumGetObjectId(idem_value(version, IDEM_COL_STATUS)));
}

/*
 * As idem_status, but a claim that must not be taken over, and whose lease has
 * ended, is what it has become: of unknown outcome.
 */
IdemStatus
idem_status_at(const IdemStore *store, const IdemVersion *version, TimestampTz now)
{
	IdemStatus	status = idem_status(store, version);

	if (status == IDEM_PROCESSING &&
		!DatumGetBool(idem_value(version, IDEM_COL_TAKEOVER)) &&
		idem_instant(version, IDEM_COL_LEASE_UNTIL) <= now)
		return IDEM_UNKNOWN;
	return status;
}

/* The ttl of the claim, in microseconds. */
int64
idem_stored_ttl(const IdemVersion *version)
{
	int64		ttl;

	(void) idem_interval_duration(DatumGetIntervalP(idem_value(version, IDEM_COL_TTL)), &ttl);
	return ttl;
}

/*
 * From when on a sweep looks at a row that expires then.  In steps, so that
 * rows claimed together share an entry of the index.
 */
#define DUE_STEP		INT64CONST(10000)

TimestampTz
idem_due(TimestampTz expires_at)
{
	int64		rest;

	if (TIMESTAMP_NOT_FINITE(expires_at))
		return expires_at;
	rest = expires_at % DUE_STEP;
	return expires_at - (rest < 0 ? rest + DUE_STEP : rest);
}

/*
 * The same for a row whose expiry moves: stays as it is if it still comes
 * before, and not so long before that sweeps would look at it again and again.
 */
TimestampTz
idem_due_still(TimestampTz due_at, TimestampTz expires_at)
{
	if (due_at <= expires_at && !TIMESTAMP_NOT_FINITE(expires_at) &&
		!TIMESTAMP_NOT_FINITE(due_at) && expires_at - due_at <= USECS_PER_HOUR)
		return due_at;
	return idem_due(expires_at);
}

bool
idem_same_bytes(const struct varlena *a, const struct varlena *b)
{
	Size		len = VARSIZE_ANY_EXHDR(a);

	return len == VARSIZE_ANY_EXHDR(b) && memcmp(VARDATA_ANY(a), VARDATA_ANY(b), len) == 0;
}
