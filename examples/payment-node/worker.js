// A worker process for the test to kill or to stop: charges one payment, prints the receipt.
import pg from 'pg';
import { chargePayment, httpProvider } from './payment.js';

const [url, order, options] = process.argv.slice(2);
const pool = new pg.Pool();
const receipt = await chargePayment(pool, httpProvider(url), JSON.parse(order), JSON.parse(options));
console.log(JSON.stringify(receipt));
await pool.end();
