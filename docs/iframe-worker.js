/* The search of a site that is opened from a folder. Browsers start no worker from a file: so its
 * script runs in a hidden frame, which answers as a worker would. The theme's plugin `offline` would
 * load such a script from the network. */
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #begun;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.#run(each);
      };
      this.#begun = this.#run(url);
    }

    #run(url) {
      return new Promise((done, failed) => {
        const page = this.#frame.contentDocument;
        const script = page.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = done;
        script.onerror = () => failed(new Error(`${script.src} cannot be read`));
        page.head.append(script);
      });
    }

    postMessage(data) {
      this.#begun.then(() => {
        const inside = this.#frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
