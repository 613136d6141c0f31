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

bool
idem_same_bytes(const struct varlena *a, const struct varlena *b)
{
	Size		len = VARSIZE_ANY_EXHDR(a);

	return len == VARSIZE_ANY_EXHDR(b) && memcmp(VARDATA_ANY(a), VARDATA_ANY(b), len) == 0;
}
