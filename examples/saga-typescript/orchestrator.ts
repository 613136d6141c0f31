// One orchestrator as a process of its own, for the test to kill: runs the saga, prints its result.
import pg from 'pg';
import { fulfil, type Order } from './order.js';

const [services, order, leaseMs] = process.argv.slice(2) as [string, string, string];
const parsed = JSON.parse(order) as Order;
const pool = new pg.Pool();
console.log(JSON.stringify(await fulfil({ id: parsed.id, pool, leaseMs: Number(leaseMs) }, parsed, services)));
await pool.end();
