/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  What the processes of the background worker have in common.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

#include "postgres.h"

#include "postmaster/bgworker.h"
#include "storage/lockdefs.h"

/* worker.c */
extern void idem_worker_describe(BackgroundWorker *worker, const char *type, const char *function);
extern void idem_worker_begin(void);
extern bool idem_worker_was_terminated(void);
extern void idem_worker_set_stopped(bool value);
extern bool idem_worker_is_stopped(void);
extern bool idem_try_lock_object(Oid database, Oid class, Oid object, LOCKMODE mode);
extern void idem_worker_init(void);

/* launcher.c */
extern PGDLLEXPORT void idem_launcher_main(Datum arg);
extern void idem_launcher_describe(BackgroundWorker *worker);
extern int	idem_launcher_pid(void);
extern bool idem_launcher_must_stop(void);

#endif							/* IDEM_WORKER_H */
