/*-------------------------------------------------------------------------
 *
 * window.h
 *	  The time of day in which the worker may sweep.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WINDOW_H
#define IDEM_WINDOW_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "utils/guc.h"

/* Minutes of the day; nothing but zeroes is always. */
typedef struct IdemWindow
{
	int			begin;
	int			end;			/* the first minute outside, up to 24:00 */
} IdemWindow;

extern bool idem_check_window(char **newval, void **extra, GucSource source);
extern void idem_assign_window(const char *newval, void *extra);
extern int	idem_window_minutes(void);
extern bool idem_window_is_open(TimestampTz at);

#endif							/* IDEM_WINDOW_H */
