/*-------------------------------------------------------------------------
 *
 * deleter.h
 *	  As whom a row is deleted.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DELETER_H
#define IDEM_DELETER_H

#include "postgres.h"

#include "utils/rel.h"

extern Oid	idem_deleter(Relation rel);

#endif							/* IDEM_DELETER_H */
