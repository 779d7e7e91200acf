// Calls to the pod that served the page. Paths are relative: the fleet may live under a prefix.

const KEY = "millstream.key";

/** An answer that is not a success, in the shape all Millstream's errors have. */
export class ApiError extends Error {
  constructor(status, error, retryAfterS) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
    this.retryAfterS = retryAfterS;
  }

  /** Whether the same request may do better later. */
  get passing() {
    return this.status === 429 || this.status >= 500;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY),
  set(value, keep) {
    this.forget();
    (keep ? localStorage : sessionStorage).setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

/** The response to a request; throws ApiError for a refusal and TypeError where no server answers. */
export async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const secret = key.get();
  const response = await fetch(path, {
    method,
    body,
    signal,
    cache: "no-store",
    headers: {
      ...(body === undefined ? {} : { "content-type": "application/json" }),
      ...(secret ? { authorization: `Bearer ${secret}` } : {}),
      ...headers,
    },
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null); // a proxy's page, perhaps
  // Who has only opened a page has done nothing wrong, and need not know of headers.
  const error = response.status === 401 && !secret
    ? { ...answer?.error, message: "This fleet asks for a key." } : answer?.error;
  throw new ApiError(response.status, error, Number(response.headers.get("retry-after")) || 0);
}

export async function json(path, options) {
  return (await request(path, options)).json();
}
