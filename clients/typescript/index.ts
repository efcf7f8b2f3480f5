/** A typed client for one server. `schema.ts` in the same folder is generated from the OpenAPI document. */

import createClient, { type Client } from "openapi-fetch";
import type { components, paths } from "./schema.js";

export type { components, paths };
export type Tarn = Client<paths>;
export type Problem = { type: string; status: number; detail: string; retryable: boolean };

/** Return a client that authenticates with this key. */
export function tarn(url: string, key: string): Tarn {
  return createClient<paths>({
    baseUrl: url,
    headers: { Authorization: `Bearer ${key}` },
    // The format in which the server expects lists: `id=a&id=b`.
    querySerializer: { array: { style: "form", explode: true } },
  });
}

/** Return the data of a response; throw an Error for a problem. */
export function done<Data>(answer: { data?: Data; error?: Problem; response: Response }): Data {
  if (answer.error !== undefined) {
    throw new Error(`${answer.error.detail} (${answer.error.type})`);
  }
  return answer.data as Data;
}
