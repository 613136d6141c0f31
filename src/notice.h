/*-------------------------------------------------------------------------
 *
 * notice.h
 *	  Tells the launcher in which databases the extension was created.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_NOTICE_H
#define IDEM_NOTICE_H

#include "postgres.h"

#define IDEM_NOTICES 32

extern void idem_notice_init(void);
extern bool idem_notice_is_given(void);
extern bool idem_notice_is_pending(void);
extern void idem_notice_listen(void);
extern int	idem_notice_take(Oid *databases);

#endif							/* IDEM_NOTICE_H */
