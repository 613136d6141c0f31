/*-------------------------------------------------------------------------
 *
 * levels.h
 *	  State of a transaction that a subtransaction's rollback takes back.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LEVELS_H
#define IDEM_LEVELS_H

#include "postgres.h"

#include "access/xact.h"

typedef struct IdemLevels
{
	void	   *state;			/* any struct without pointers */
	Size		size;
	struct IdemSavedState *saved;	/* as it was; in TopTransactionContext */
} IdemLevels;

extern void idem_levels_save(IdemLevels *levels);
extern void idem_levels_leave(IdemLevels *levels, SubXactEvent event);
extern void idem_levels_end(IdemLevels *levels);

#endif							/* IDEM_LEVELS_H */
