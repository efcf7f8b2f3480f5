/** Test scenario for the TypeScript client: create a dataset, write, flush, read back, export; print the results. */

import { type components, done, tarn } from "./index.js";

const [url, key, name] = process.argv.slice(2) as [string, string, string];
const client = tarn(url, key);
const dataset = { path: { dataset: name } };

/** Wait for a job and return it: the first flush of a server starts Spark, which may take longer than one wait. */
async function finished(job: components["schemas"]["Job"]): Promise<components["schemas"]["Job"]> {
  if (job.finished !== null) return job;
  return finished(done(await client.GET("/v1/jobs/{job}", { params: { path: { job: job.id }, query: { wait: 60 } } })));
}

done(await client.POST("/v1/datasets", { body: { name, title: "Made by TypeScript" } }));
const people = ["jane", "joe"].map((id) => ({ id, schema: "Person", properties: { name: [`${id} Doe`] } }));
const written = done(
  await client.POST("/v1/datasets/{dataset}/entities", {
    params: { ...dataset, query: { origin: "typescript" } },
    headers: { "Content-Type": "application/x-ndjson" },
    body: people.map((person) => JSON.stringify(person)).join("\n"),
    bodySerializer: (lines) => lines,
  }),
);
const flushed = await finished(
  done(await client.POST("/v1/datasets/{dataset}/operations/flush", { params: { ...dataset, query: { wait: 60 } } })),
);
const jane = done(
  await client.GET("/v1/datasets/{dataset}/entities/{entity}", {
    params: { path: { dataset: name, entity: "jane" }, query: { fresh: "snapshot" } },
  }),
);
const missing = await client.GET("/v1/datasets/{dataset}/entities/{entity}", {
  params: { path: { dataset: name, entity: "nobody" } },
});
const stream = await client.GET("/v1/datasets/{dataset}/entities/stream", { params: dataset, parseAs: "text" });
const made = await finished(
  done(
    await client.POST("/v1/datasets/{dataset}/operations/export", {
      params: { ...dataset, query: { wait: 60 } },
      body: { kinds: ["entities"] },
    }),
  ),
);
const exported = await client.GET("/v1/datasets/{dataset}/exports/{name}", {
  params: { path: { dataset: name, name: "entities.ftm.json" } },
  parseAs: "text",
});

console.log(
  JSON.stringify({
    written: [written.entities, written.statements],
    flushed: flushed.state,
    caption: jane.caption,
    missing: [missing.response.status, missing.error?.type.split("/").pop()],
    streamed: String(stream.data).trim().split("\n").length,
    made: made.state,
    exported: String(exported.data).trim().split("\n").length,
  }),
);
