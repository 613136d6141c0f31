// A payment service in front of a provider that charges: the middleware in use.
import express from 'express';
import pg from 'pg';
import { idempotency, keepRawBody } from './idempotency.js';

const pool = new pg.Pool();
pool.on('error', (error) => console.error(error.message)); // an idle connection was lost

const app = express();
app.use(express.json({ verify: keepRawBody }));
app.use(idempotency({ db: () => pool, lease: process.env.LEASE ?? '1 minute' }));

app.post('/payments', async (req, res) => {
  const charge = await fetch(process.env.PROVIDER, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', 'Idempotency-Key': req.idempotency.uuid },
    body: JSON.stringify(req.body),
  });
  res.status(charge.status).json({ ...await charge.json(), attempt: req.idempotency.attempt });
});

const server = app.listen(process.env.PORT ?? 3000, '127.0.0.1', () => console.log(server.address().port));
