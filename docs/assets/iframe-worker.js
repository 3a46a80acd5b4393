// Browsers start no worker from a page that was opened from disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  // Later, and a copy: as between a page and a worker.
  const deliver = (data, receive) => {
    const event = new MessageEvent("message", { data: structuredClone(data) });
    setTimeout(() => receive(event));
  };

  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => deliver(data, (event) => this.onmessage?.(event));
      this.started = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${address}`));
        script.src = address;
        inside.document.head.append(script);
      });
      this.started.catch((error) => this.onerror?.(error));
    }

    postMessage(data) {
      this.started.then(() => deliver(data, (event) => this.frame.contentWindow?.onmessage(event)), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
