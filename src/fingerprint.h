/*-------------------------------------------------------------------------
 *
 * fingerprint.h
 *	  The fingerprint of a request.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FINGERPRINT_H
#define IDEM_FINGERPRINT_H

#include "postgres.h"

#include "utils/array.h"
#include "utils/jsonb.h"

extern void idem_check_ignore(ArrayType *ignore);
extern bytea *idem_fingerprint_of(Jsonb *request, ArrayType *ignore);

#endif							/* IDEM_FINGERPRINT_H */
