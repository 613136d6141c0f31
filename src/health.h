/*-------------------------------------------------------------------------
 *
 * health.h
 *	  Is there anything an administrator should see to?
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HEALTH_H
#define IDEM_HEALTH_H

extern void idem_health_report(uint32 *memory);

#endif							/* IDEM_HEALTH_H */
