// Browsers start no Worker from a file: there, search runs in a hidden frame instead. Material's offline plugin would load
// such a script from elsewhere, unless one of this name is given.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.document.write("<body></body>");
      this.scope.document.close();
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...sources) => {
        for (const source of sources) await this.load(source);
      };
      this.ready = this.load(url);
    }

    load(source) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
