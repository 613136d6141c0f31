/*-------------------------------------------------------------------------
 *
 * state.h
 *	  What a version of a key's row says at a given instant.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STATE_H
#define IDEM_STATE_H

#include "store.h"

extern TimestampTz idem_instant(const IdemVersion *version, IdemColumn column);
extern bool idem_is_live(const IdemVersion *version, TimestampTz now);
extern IdemStatus idem_status(const IdemStore *store, const IdemVersion *version);
extern IdemStatus idem_status_at(const IdemStore *store, const IdemVersion *version,
								 TimestampTz now);
extern int64 idem_stored_ttl(const IdemVersion *version);
extern TimestampTz idem_due(TimestampTz expires_at);
extern TimestampTz idem_due_still(TimestampTz due_at, TimestampTz expires_at);
extern bool idem_same_bytes(const struct varlena *a, const struct varlena *b);

#endif							/* IDEM_STATE_H */
