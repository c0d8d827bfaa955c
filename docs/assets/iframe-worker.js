// Browsers refuse to start a Web Worker from a file:// page, and the search of the theme runs in one. This file
// replaces Worker by a hidden iframe that runs the same script, so that the search works from the disk.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.ready = true;
        this.queue.forEach((data) => this.deliver(data));
      };
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `cannot load ${url}` }));
      inside.document.body.appendChild(script);
    }

    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.queue.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
