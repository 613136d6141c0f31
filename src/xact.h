/*-------------------------------------------------------------------------
 *
 * xact.h
 *	  What the current transaction has done to keys.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_XACT_H
#define IDEM_XACT_H

#include "store.h"

extern void idem_xact_init(void);
extern void idem_xact_claimed(const IdemStore *store, int64 token);
extern bool idem_xact_is_own_claim(const IdemStore *store);
extern void idem_xact_settled(bool own_claim);
extern void idem_xact_changed(void);
extern void idem_xact_touched(IdemStore *store);
extern bool idem_is_transient(int sqlstate);

#endif							/* IDEM_XACT_H */
