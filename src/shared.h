/*-------------------------------------------------------------------------
 *
 * shared.h
 *	  The extension's parts of shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SHARED_H
#define IDEM_SHARED_H

#include "postgres.h"

/* Sets up a part of shared memory that is new. */
typedef void (*IdemSharedInit) (void *part);

extern void idem_shared_add(const char *name, Size size, IdemSharedInit init, void **part);
extern void idem_shared_init(void);

#endif							/* IDEM_SHARED_H */
