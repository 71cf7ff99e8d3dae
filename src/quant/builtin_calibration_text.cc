#include "quant/calibration_data.h"

namespace mi::quant {

const std::string& builtin_calibration_text() {
  static const std::string text =
      R"TEXT(The ferry left the harbour a little after six, when the fog had thinned enough to show the far shore. Most of the passengers stood on the upper deck with their collars turned up, watching the gulls keep pace with the stern. Nobody spoke much. A boy of about nine counted the buoys aloud and lost his place twice.

Water boils at a lower temperature on a mountain because the air above it weighs less. At three thousand metres it boils near ninety degrees Celsius, so rice and potatoes take longer to cook, and a pressure cooker becomes more than a convenience.

User: Can you tell me which of these two plans is cheaper over a year? Plan A costs 12.50 a month with a joining fee of 20. Plan B costs 14 a month and the first month is free.
Assistant: Plan A costs 12 x 12.50 + 20 = 170. Plan B costs 11 x 14 = 154. Plan B is cheaper by 16 over the first year; from the second year on, Plan A costs 150 and Plan B costs 168.

def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    return out + left[i:] + right[j:]

for (size_t i = 0; i + 1 < values.size(); ++i) {
  if (values[i] > values[i + 1]) { std::swap(values[i], values[i + 1]); swapped = true; }
}

SELECT city, COUNT(*) AS orders, ROUND(AVG(total), 2) AS mean FROM orders WHERE placed_at >= '2024-01-01' GROUP BY city HAVING COUNT(*) > 10 ORDER BY mean DESC LIMIT 5;

{"id": 4821, "customer": {"name": "Ines Duarte", "email": "ines@example.org", "address": {"street": "Rua do Carmo 7", "city": "Porto", "zip": "4050-164"}}, "items": [{"sku": "LAMP-02", "count": 2, "price": 39.9}, {"sku": "BULB-E27", "count": 4, "price": 3.25}], "paid": true, "note": null}

name,age,height_cm,member
Aiko,34,162,yes
Bruno,28,181,no
Chidi,45,175,yes

Let f(x) = 3x^2 - 12x + 7. Its derivative is 6x - 12, which is zero at x = 2, and f(2) = 12 - 24 + 7 = -5. Since the coefficient of x^2 is positive, the point (2, -5) is a minimum. The roots are x = 2 plus or minus the square root of 5/3.

1 + 1 = 2. 17 x 23 = 391. 1024 / 16 = 64. 45 % of 260 is 117. The sum of the first hundred integers is 5050.

A train leaves at 14:05 and arrives at 16:50. The journey takes two hours and forty-five minutes. At an average of 96 kilometres an hour it covers 264 kilometres.

从前有一座小城，城外有一条河，河上有一座石桥。每天早晨，卖豆腐的老人推着车从桥上走过，孩子们跟在后面唱歌。下雨的时候，桥上没有人，只有水声。

问：北京到上海的高铁大约要多长时间？答：最快的列车大约需要四个半小时。请注意，不同车次停靠的车站不同，所以时间也不一样。

昨日の会議では、来年の予算について話し合いました。結論はまだ出ていませんが、来週もう一度集まることになりました。

Der Wanderer blieb am Waldrand stehen und blickte zurück ins Tal. Unten lagen die Dächer des Dorfes, und aus den Schornsteinen stieg dünner Rauch. Er hatte noch zwei Stunden bis zur Hütte.

La bibliothèque ferme à dix-neuf heures en semaine et à dix-sept heures le samedi. Pour emprunter un livre, il faut présenter une carte valable et respecter le délai de trois semaines.

El mercado abre los martes y los viernes. Los vecinos compran fruta, pan y queso, y a veces se quedan a conversar hasta el mediodía. В городе весной зацветают липы, и вечером на площади играет музыка.

Dear team, the deployment on Thursday is moved to Monday at 09:30 because the certificate of the staging host expires on the weekend. Please finish your reviews by Friday noon. Open points: (1) rotate the keys, (2) update the dashboard, (3) tell support. Thank you, Marta.

# Installation
1. Download the archive and unpack it.
2. Run `./configure --prefix=/usr/local` and then `make -j4`.
3. Check the result with `make test`; every line should end in OK.
> Note: version 2.4 needs at least 4 GB of memory.

ERROR 2024-03-18T07:42:11Z worker-3 request 9f2c failed after 3 retries: connection reset by peer (10.0.3.17:5432). Next attempt in 30 s.

Q: What is the capital of Australia? A: Canberra. Q: Who wrote Faust? A: Johann Wolfgang von Goethe. Q: How many sides has a hexagon? A: Six. Q: What do bees collect? A: Nectar and pollen.

The heart pumps about five litres of blood a minute at rest. The right side sends it to the lungs, where it takes up oxygen, and the left side sends it to the rest of the body. During hard exercise the flow can rise fourfold.

Under the contract the supplier shall deliver the goods within thirty days of the order. If delivery is late by more than ten days, the buyer may withdraw, unless the delay is due to events that neither party could foresee. Notices must be given in writing.

"You took the wrong turn," she said, unfolding the map. "Did I?" He slowed down and looked at the sign. "It said north." "It said Northam. That is a village." They both laughed, and he turned the car around at the next gate.

Mix 250 g of flour with a pinch of salt, rub in 125 g of cold butter, and add three spoons of ice water. Rest the dough for half an hour, roll it out thin, line a 26 cm tin, and bake it blind at 190 degrees for fifteen minutes.

Abc aBC ABC xyz XYZ 0123456789 ... --- ??? !!! () [] {} <> "" '' `` ~ @ # $ % ^ & * _ + = | \ / ; : , . 😀 🚀 café naïve Ångström ½ ② Ⅳ
)TEXT";
  return text;
}

}  // namespace mi::quant
