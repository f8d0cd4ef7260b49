// A service worker that adds to every answer the two headers of cross-origin isolation, for servers that send none
// (GitHub Pages): https://html.spec.whatwg.org/multipage/browsers.html#coep. It keeps nothing.

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => event.respondWith(isolated(event.request)));

async function isolated(request) {
    const answer = await fetch(request);
    if (answer.status === 0) return answer; // a redirect that the browser follows itself
    const headers = new Headers(answer.headers);
    headers.set("Cross-Origin-Opener-Policy", "same-origin");
    headers.set("Cross-Origin-Embedder-Policy", "require-corp");
    return new Response(answer.body, { status: answer.status, statusText: answer.statusText, headers });
}
