// Picks out one rank in every drawing. Without this script the page says the same.
document.documentElement.classList.add("js");
for (const pick of document.querySelectorAll(".pick select")) {
  pick.addEventListener("change", () => {
    for (const other of document.querySelectorAll(".pick select")) other.value = pick.value;
    document.body.classList.toggle("picked", pick.value !== "");
    for (const shape of document.querySelectorAll(".on")) shape.classList.remove("on");
    if (pick.value !== "") for (const shape of document.querySelectorAll(".k" + pick.value)) shape.classList.add("on");
  });
}
