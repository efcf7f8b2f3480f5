/** A typed client of one server: `schema.ts` beside this file is generated from its OpenAPI document. */

import createClient, { type Client } from "openapi-fetch";
import type { components, paths } from "./schema.js";

export type { components, paths };
export type Tarn = Client<paths>;
export type Problem = { type: string; status: number; detail: string; retryable: boolean };

/** A client that sends this key. */
export function tarn(url: string, key: string): Tarn {
  return createClient<paths>({
    baseUrl: url,
    headers: { Authorization: `Bearer ${key}` },
    // As the server reads lists: `id=a&id=b`.
    querySerializer: { array: { style: "form", explode: true } },
  });
}

/** What a call answered, or its problem as an error. */
export function done<Data>(answer: { data?: Data; error?: Problem; response: Response }): Data {
  if (answer.error !== undefined) {
    throw new Error(`${answer.error.detail} (${answer.error.type})`);
  }
  return answer.data as Data;
}
