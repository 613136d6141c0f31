/*-------------------------------------------------------------------------
 *
 * init.c
 *	  What happens when the library is loaded, by a session's first call or
 *	  through shared_preload_libraries.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

#include "extension.h"
#include "settings.h"
#include "shared.h"
#include "stats.h"
#include "waiters.h"
#include "worker.h"
#include "xact.h"

PG_MODULE_MAGIC;

void		_PG_init(void);

void
_PG_init(void)
{
	idem_define_settings();
	idem_extension_init();
	idem_xact_init();
	idem_waiters_init();
	idem_stats_init();
	idem_worker_init();
	idem_shared_init();
}
